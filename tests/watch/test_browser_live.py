"""Whole runs in Chromium: a live run, one that is killed and resumed, many runs, many steps, hostile text."""

import json
import math
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.page import HOSTILE, Page, completions_of, rows_of
from tests.support.runs import whet
from tests.support.waiting import wait_until

pytestmark = pytest.mark.browser


def quickstart(folder: Path, **settings: Any) -> Any:
    """`whet train quickstart` in a process of its own, shorter."""
    short = {"output_dir": folder, "eval_num_samples": 30, "log_completions_steps": 2, "preflight": "off"}
    words = [f"{key}={value}" for key, value in {**short, **settings}.items()]
    return whet("train", "quickstart", "watch=false", *words)


def shown_steps(page: Page, metric: str) -> list[int]:
    """The steps that a chart has, read from its table."""
    selector = f"figure[data-metric='{metric}']"
    if page.attribute(f"{selector} details", "open") is None:
        page.click(f"{selector} details summary")
        wait_until(lambda: page.count(f"{selector} tbody tr"))
    return [int(step) for step in page.texts(f"{selector} tbody th")]


def test_a_live_quickstart_from_step_0_to_its_end(page: Page, serve: Callable, tmp_path: Path) -> None:
    address = serve(tmp_path)
    page.show(address)
    assert "no run" in wait_until(lambda: page.text("#state").replace("Reading the runs.", ""))
    process = quickstart(tmp_path, max_steps=6, fixed_eval_steps=3)
    folder = tmp_path / "quickstart"
    wait_until(lambda: "quickstart: running, step 0" in page.text("#state"), 120)  # the open page notices it
    wait_until(lambda: "evaluation" in page.text("#stage") or "rollout" in page.text("#stage"), 120)
    steps = []
    while "ended" not in (state := page.text("#state")):
        step = int(state.rsplit("step ", 1)[1])
        steps += [] if steps and steps[-1] == step else [step]
        assert len(steps) < 20 and process.poll() in (None, 0)
        time.sleep(0.05)
    assert steps[0] == 0 and steps == sorted(steps) and len(steps) >= 4
    assert process.wait(60) == 0
    wait_until(lambda: page.facts(".tiles").get("state") == "ended")
    last, tiles = rows_of(folder)[-1], page.facts(".tiles")
    assert tiles["step"] == "6 / 6" and tiles["accuracy"] == f"{100 * last['accuracy']:.1f} %"
    assert float(tiles["reward"]) == pytest.approx(last["reward"], rel=1e-3)
    assert float(tiles["tokens/s"].replace(",", "")) == pytest.approx(last["tokens_per_s"], rel=1e-3)
    assert float(tiles["peak memory"].removesuffix(" GB")) == pytest.approx(last["peak_memory_gb"], rel=1e-3)
    newest = json.loads((folder / "status.json").read_text())["newest"][1]
    assert page.text("#newest").strip() == newest.strip() != ""
    assert page.count(".finding")

    page.show(address, runs="quickstart", view="curves")
    wait_until(lambda: page.count("figure") > 8)
    assert shown_steps(page, "reward") == [1, 2, 3, 4, 5, 6]
    for key in ("reward", "grad_norm", "completions/mean_length"):
        assert page.newest(key) == pytest.approx(last[key], rel=1e-3)
    page.show(address, runs="quickstart", view="groups", step="6")
    wait_until(lambda: page.count(".tokens span"))
    rows = completions_of(folder, 6)
    assert page.count(".list button") == len({row["problem"] for row in rows}) == 16
    own = [row for row in rows if row["problem"] == page.text("section h2")]
    assert page.count(".tokens span") == sum(row["length"] for row in own)
    page.show(address, runs="quickstart", view="evaluation")
    wait_until(lambda: page.count(".pairs tbody tr") == 30)
    assert page.is_quiet()


def test_a_run_that_is_killed_and_resumed(page: Page, serve: Callable, tmp_path: Path) -> None:
    settings = {"max_steps": 8, "save_steps": 2, "fixed_eval_steps": 4}
    folder = tmp_path / "quickstart"
    process = quickstart(tmp_path, **settings)
    wait_until(lambda: (folder / "metrics.jsonl").is_file(), 120)
    page.show(serve(tmp_path), runs="quickstart", view="curves")
    wait_until(lambda: "step 5" in page.text("#state"), 120)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = rows_of(folder)
    assert shown_steps(page, "reward") == [row["step"] for row in before]
    wait_until(lambda: "silent" in page.text("#state"), 60)
    page.click("nav button")
    wait_until(lambda: "No sign of life" in page.text("#stage"))
    process = quickstart(tmp_path, auto_resume="true", overwrite_output_dir="false", **settings)
    wait_until(lambda: "running" in page.text("#state"), 120)
    wait_until(lambda: "ended" in page.text("#state") and "step 8" in page.text("#state"), 120)
    assert process.wait(60) == 0
    wait_until(lambda: page.facts(".tiles").get("resumed") == "at step 4")
    page.click("nav button:nth-child(2)")
    wait_until(lambda: page.count("figure[data-metric='reward']"))
    assert shown_steps(page, "reward") == [1, 2, 3, 4, 5, 6, 7, 8]
    shown = [float(cell) for cell in page.texts("figure[data-metric='reward'] tbody td")]
    rows = rows_of(folder)
    assert shown == pytest.approx([row["reward"] for row in rows], rel=1e-3)
    assert [row["reward"] for row in before] == [row["reward"] for row in rows[: len(before)]]  # bit-exact
    assert page.is_quiet()


def make_run(folder: Path, num_steps: int = 3, **config: Any) -> None:
    folder.mkdir(parents=True)
    settings = {"model_name_or_path": "pebble", "max_steps": num_steps, **config}
    (folder / "config.yaml").write_text(json.dumps(settings))
    numbers = {f"metric_{n}": 0.5 for n in range(40)}
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            row = {"step": step, "kind": "train", "reward": math.sin(step / 100), "step_time": 1.0, **numbers}
            file.write(json.dumps(row) + "\n")


def test_hostile_text_is_text(page: Page, serve: Callable, tmp_path: Path) -> None:
    """In every field that a model or a task can write."""
    folder = tmp_path / "bad"
    make_run(folder, run_name=HOSTILE, model_name_or_path=HOSTILE)
    for name in ("completions", "eval_results"):
        (folder / name).mkdir()
    long, right_to_left = "x" * 1_000_000, "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 " * 20
    row = {"step": 3, "problem": HOSTILE, "task": HOSTILE, "sample": 0, "reward": 0.0, "length": 5}
    row |= {
        "messages": [{"role": HOSTILE, "content": HOSTILE}],
        "finish": "stop",
        "parts": {"correct": 0.0, HOSTILE: 1.0},
    }
    row |= {
        "answer": HOSTILE,
        "gold": HOSTILE,
        "failure": HOSTILE,
        "outcome": HOSTILE,
        "extra": {HOSTILE: HOSTILE},
    }
    rows = [{**row, "sample": n, "completion": line} for n, line in enumerate((HOSTILE, long, right_to_left))]
    (folder / "completions" / "step_3.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    description = {
        "step": 3,
        "columns": ["sampler_logprob"],
        "rules": ["clipped", HOSTILE],
        "completions": [{**rows[0], "tokens": 3}],
        "texts": {"0": HOSTILE, "1": "<b>", "2": "\u202e"},
    }
    np.savez(
        folder / "completions" / "tokens_3.npz",
        token_ids=np.arange(3, dtype=np.int32),
        numbers=np.zeros((1, 3), dtype=np.float32),
        rules=np.full(3, 3, dtype=np.uint8),
        description=np.frombuffer(json.dumps(description).encode(), dtype=np.uint8),
    )
    for step in (0, 3):
        document = {
            "step": step,
            "summary": {"per_task": {HOSTILE: {"accuracy": {"mean": 0.5, "low": 0, "high": 1}}}},
        }
        document["completions"] = [{**rows[0], "correct": False}]
        (folder / "eval_results" / f"eval_step_{step}.json").write_text(json.dumps(document))
    status = {"state": "failed", "time": time.time(), "stages": [[HOSTILE]], "newest": [HOSTILE, HOSTILE]}
    (folder / "status.json").write_text(json.dumps({**status, "reason": HOSTILE}))
    address = serve(tmp_path)
    for view, selector in (
        ("groups", ".completion"),
        ("now", "#newest"),
        ("evaluation", ".pairs tbody"),
        ("curves", "#tasks"),
    ):
        page.show(address, runs="bad", view=view, step="3", coloring="rule")
        wait_until(lambda selector=selector: "window.hit=1" in page.text(selector))
        page.check_harmless()
    page.show(address, runs="bad", view="groups", step="3")
    wait_until(lambda: page.count(".completion") == 3)
    assert page.count(".tokens span") == 3
    # A million characters are cut, and there on demand; the page stays as wide as the window.
    assert len(page.texts(".completion pre")[0]) < 30_000
    page.click(".completion pre button")
    assert len(page.texts(".completion pre")[0]) == 1_000_000
    assert right_to_left.strip() in page.text(".completion:nth-child(3)")
    assert page.script("return document.documentElement.scrollWidth <= innerWidth")
    assert page.is_quiet()


def test_fifty_runs_overlaid_and_a_grid(page: Page, serve: Callable, tmp_path: Path) -> None:
    parent = tmp_path / "compare"
    cells = []
    for number in range(55):
        variant, seed = f"learning_rate=1e-{number % 11}", number // 11
        name = f"{variant}_seed={seed}"
        cells.append({"name": name, "variant": variant, "seed": seed, "settings": []})
        if number < 50:  # the others wait
            make_run(parent / "runs" / name, num_steps=3 + number)
        if number < 40:
            ends = {"accuracy_before": {"mean": 0.25}, "accuracy_after": {"mean": 0.01 * number}}
            ends |= {"greedy_before": None, "greedy_after": None, "seconds": 1.0, "steps": 3}
            (parent / "runs" / name / "train_results.json").write_text(json.dumps(ends))
    (parent / "grid.json").write_text(json.dumps({"source": "quickstart", "cells": cells}))
    address = serve(tmp_path)
    page.show(address, view="compare")
    wait_until(lambda: page.count("#runs tbody tr") == 50 and page.count("#grid tbody tr") == 11)
    assert "40 of 55 runs" in page.text("#matches")
    wait_until(lambda: "step 47" in page.text("#grid tbody tr"))  # the run of 3 + 44 steps has not ended
    line = page.texts("#grid tbody tr:nth-child(3) > *")
    assert line[0] == "learning_rate=1e-2" and line[1:5] == [
        f"25.0 % \u2192 {n}.0 %" for n in (2, 13, 24, 35)
    ]
    assert line[6] == "18.5 %" and line[7].startswith("-6.5 [")
    waiting = [cell for cell in page.texts("#grid tbody td") if cell == "waiting"]
    assert len(waiting) == 5
    page.click(".controls button")  # all curves: 50 runs over one connection
    legend = "figure[data-metric='reward'] .legend > span"
    wait_until(lambda: page.count(legend) == 50)
    label = str(page.attribute("figure[data-metric='reward'] svg", "aria-label"))
    for number in (7, 44):
        name = f"compare/runs/learning_rate=1e-{number % 11}_seed={number // 11}"
        assert f"{name}: {float(f'{math.sin((3 + number) / 100):.4g}')}" in label
    # A run that is written anew, as at a resume, with fewer rows.
    name = "compare/runs/learning_rate=1e-7_seed=0"
    page.show(address, runs=name, view="curves")
    wait_until(lambda: "step 10" in page.text("#state"))
    shutil.rmtree(tmp_path / name)
    make_run(tmp_path / name, num_steps=2)
    wait_until(lambda: "step 2" in page.text("#state"))
    assert page.is_quiet()


def test_five_thousand_steps_open_in_two_seconds_and_scroll(
    page: Page, serve: Callable, tmp_path: Path
) -> None:
    make_run(tmp_path / "long", num_steps=5000)
    address = serve(tmp_path)
    seconds: list[float] = []
    for _ in range(3):  # the best: other programs of the machine only slow it down
        page.browser.get("about:blank")
        started_at = time.monotonic()
        page.browser.get(f"{address}/#runs=long&view=curves")
        wait_until(lambda: "step 5000" in page.text("#state") and page.count("figure path"))
        seconds.append(time.monotonic() - started_at)
    assert min(seconds) < 2.0
    page.click_button("all ")
    wait_until(lambda: page.count("figure") > 40)
    frames = page.browser.execute_async_script(
        "const done = arguments[0], times = []; let last = performance.now();"
        "const step = (now) => { times.push(now - last); last = now; scrollBy(0, 80);"
        "  times.length < 40 ? requestAnimationFrame(step) : done(times); }; requestAnimationFrame(step)"
    )
    assert float(np.median(frames)) < 100 and page.script("return scrollY") > 1000
    assert page.newest("reward") == pytest.approx(math.sin(50), rel=1e-3)
