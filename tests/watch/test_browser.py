"""The page of `whet watch` in a real browser: Chromium, driven by Selenium (make test-browser)."""

import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest

from tests.support.runs import whet, words
from whetstone.watch.server import WatchServer

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver"),
]
HOSTILE = (
    "<img src=x onerror='window.hit=1'><script>window.hit=1</script>\u202eabc\x1b[2J\x00"
    '"><svg onload=window.hit=1>{{7*7}}'
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,1400"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(service=webdriver.ChromeService(DRIVER), options=options)
    yield driver
    driver.quit()


@pytest.fixture
def serve() -> Iterator[Callable[[Path], str]]:
    servers = []

    def start(folder: Path) -> str:
        server = WatchServer(folder)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
        return server.address

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def show(browser: Any, address: str, **parts: str) -> None:
    browser.get("about:blank")
    browser.get(f"{address}/#{urlencode(parts)}")


def text(browser: Any, selector: str = "body") -> str:
    return browser.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", selector)


def until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return value


def rows_of(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == "train"]


def count(browser: Any, selector: str) -> int:
    return browser.execute_script("return document.querySelectorAll(arguments[0]).length", selector)


def is_quiet(browser: Any) -> bool:
    """Nothing failed, nothing was refused, and every request went to this machine."""
    logged = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    script = "return performance.getEntriesByType('resource').map((e) => new URL(e.name).hostname)"
    return not logged and set(browser.execute_script(script)) <= {"127.0.0.1"}


def test_a_live_run_from_its_start_to_its_end(browser: Any, serve: Callable, tmp_path: Path) -> None:
    address = serve(tmp_path)
    show(browser, address)
    assert "no run" in until(lambda: text(browser, "#state").replace("Reading the runs.", ""))
    settings = {"max_steps": 4, "log_completions_steps": 2, "prompts_per_step": 4, "log_tokens_groups": 2}
    process = whet("train", *words(tmp_path, **settings))
    folder = tmp_path / "run"
    until(lambda: (folder / "status.json").is_file(), 120)
    show(browser, address, runs="run", view="now")
    until(lambda: "running" in text(browser, "#state"), 60)
    until(lambda: "step 4" in text(browser, "#state") and "ended" in text(browser, "#state"), 240)
    assert process.wait(60) == 0
    last = rows_of(folder)[-1]
    now = until(lambda: text(browser, "main"))
    newest = json.loads((folder / "status.json").read_text())["newest"][1]
    assert text(browser, "#newest").strip() == newest.strip() != ""
    assert "4 / 4" in now and f"{100 * last['accuracy']:.1f} %" in now
    assert is_quiet(browser)

    show(browser, address, runs="run", view="curves")
    until(lambda: count(browser, "figure") > 8)
    for key in ("reward", "grad_norm", "completions/mean_length"):
        script = "return document.querySelector(`figure[data-metric='${arguments[0]}'] svg`).ariaLabel"
        label = browser.execute_script(script, key)
        assert float(label.rsplit(" ", 1)[1].replace(",", "")) == pytest.approx(last[key], rel=1e-3)
    steps = browser.execute_script(
        "const svg = document.querySelector(`figure[data-metric='reward'] svg`); svg.focus();"
        "const seen = []; for (let n = 0; n < 4; n++) {"
        "  svg.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight'}));"
        "  seen.push(svg.parentElement.querySelector('.readout').innerText); } return seen"
    )
    expected = [f"step {row['step']}" for row in rows_of(folder)]
    assert [line.split(":")[0] for line in steps] == expected
    assert [float(line.split(": ")[1]) for line in steps] == pytest.approx(
        [row["reward"] for row in rows_of(folder)], rel=1e-3
    )

    show(browser, address, runs="run", view="groups", step="4")
    until(lambda: count(browser, ".tokens span"))
    lines = [json.loads(line) for line in (folder / "completions" / "step_4.jsonl").read_text().splitlines()]
    assert count(browser, ".list button") == len({row["problem"] for row in lines}) == 4
    shown = text(browser, "section h2")
    own = [row for row in lines if row["problem"] == shown]
    assert count(browser, ".tokens span") == sum(row["length"] for row in own)
    with np.load(folder / "completions" / "tokens_4.npz") as file:
        logprob = float(file["numbers"][2, 0])  # the sampler's, of the first token
    told = browser.execute_script(
        "const span = document.querySelector('.tokens span');"
        "span.dispatchEvent(new PointerEvent('pointerover', {bubbles: true}));"
        "return span.closest('.completion').querySelector('.readout').innerText"
    )
    sampler = next(part for part in told.split("; ") if part.startswith("logprob (sampler)"))
    assert float(sampler.rsplit(" ", 1)[1]) == pytest.approx(logprob, rel=1e-2, abs=1e-4)
    mixed = {
        row["problem"]
        for row in lines
        if len({r["reward"] for r in lines if r["problem"] == row["problem"]}) > 1
    }
    browser.execute_script(
        "const box = document.querySelector('select[aria-label=filter]'); box.value = 'mixed'; box.onchange()"
    )
    until(lambda: count(browser, ".list button") == len(mixed))
    show(browser, address, runs="run", view="evaluation")
    until(lambda: count(browser, "main tbody tr") == 6)
    evaluations = {step: folder / "eval_results" / f"eval_step_{step}.json" for step in (0, 4)}
    right = [
        {row["problem"]: row["correct"] for row in json.loads(path.read_text())["completions"]}
        for path in evaluations.values()
    ]
    became = [problem for problem in right[0] if right[1][problem] and not right[0][problem]]
    browser.execute_script(
        "const box = document.querySelector('select[aria-label=change]');"
        "box.value = 'became right'; box.onchange()"
    )
    until(lambda: count(browser, "main tbody tr") == len(became))
    assert is_quiet(browser)


def make_run(folder: Path, num_steps: int = 3, **config: Any) -> None:
    folder.mkdir(parents=True)
    settings = {"model_name_or_path": "pebble", "max_steps": num_steps, **config}
    (folder / "config.yaml").write_text(json.dumps(settings))
    numbers = {f"metric_{n}": 0.5 for n in range(40)}
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            row = {"step": step, "kind": "train", "reward": math.sin(step / 100), "step_time": 1.0, **numbers}
            file.write(json.dumps(row) + "\n")


def test_hostile_text_is_text(browser: Any, serve: Callable, tmp_path: Path) -> None:
    make_run(tmp_path / "bad", run_name=HOSTILE)
    (tmp_path / "bad" / "completions").mkdir()
    row = {"step": 3, "problem": HOSTILE, "sample": 0, "reward": 0.0, "parts": {"correct": 0.0}, "length": 5}
    row |= {
        "messages": [{"role": "user", "content": HOSTILE}],
        "answer": HOSTILE,
        "failure": HOSTILE,
        "finish": "stop",
    }
    lines = [{**row, "completion": HOSTILE}, {**row, "sample": 1, "completion": "x" * 1_000_000}]
    (tmp_path / "bad" / "completions" / "step_3.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in lines)
    )
    show(browser, serve(tmp_path), runs="bad", view="groups", step="3")
    until(lambda: "window.hit=1" in text(browser, ".completion"))
    assert browser.execute_script("return window.hit") is None
    assert count(browser, "main img, main script, main svg[onload]") == 0
    assert "\u202e" not in text(browser) and "\x1b" not in text(browser)
    assert is_quiet(browser)


def test_fifty_runs_and_a_run_that_is_written_anew(browser: Any, serve: Callable, tmp_path: Path) -> None:
    for number in range(50):
        make_run(tmp_path / f"run_{number:02}")
    show(browser, serve(tmp_path), runs="run_07\nrun_11", view="curves")
    until(lambda: count(browser, "#runs tbody tr") == 50)
    until(lambda: "run_07" in text(browser, "#state") and "step 3" in text(browser, "#state"))
    label = "return document.querySelector(\"figure[data-metric='reward'] svg\").ariaLabel"
    assert "run_07" in browser.execute_script(label) and "run_11" in browser.execute_script(label)
    shutil.rmtree(tmp_path / "run_07")
    make_run(tmp_path / "run_07", num_steps=2)  # killed, and resumed from an earlier step
    until(lambda: "step 2" in text(browser, "#state"))


def test_five_thousand_steps_open_in_two_seconds(browser: Any, serve: Callable, tmp_path: Path) -> None:
    make_run(tmp_path / "long", num_steps=5000)
    address = serve(tmp_path)
    browser.get("about:blank")
    started_at = time.monotonic()
    browser.get(f"{address}/#runs=long&view=curves")
    until(lambda: "step 5000" in text(browser, "#state") and count(browser, "figure path"))
    assert time.monotonic() - started_at < 2.0
