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

from tests.support.runs import whet
from tests.watch.pages import (
    HOSTILE,
    attribute,
    click,
    completions_of,
    count,
    facts,
    is_quiet,
    rows_of,
    show,
    text,
    texts,
    until,
)

pytestmark = pytest.mark.browser


def quickstart(folder: Path, **settings: Any) -> Any:
    """`whet train quickstart` in a process of its own, shorter."""
    short = {"output_dir": folder, "eval_num_samples": 30, "log_completions_steps": 2, "preflight": "off"}
    words = [f"{key}={value}" for key, value in {**short, **settings}.items()]
    return whet("train", "quickstart", "watch=false", *words)


def shown_steps(browser: Any, metric: str) -> list[int]:
    """The steps that a chart has, read from its table."""
    selector = f"figure[data-metric='{metric}']"
    if attribute(browser, f"{selector} details", "open") is None:
        click(browser, f"{selector} details summary")
        until(lambda: count(browser, f"{selector} tbody tr"))
    return [int(step) for step in texts(browser, f"{selector} tbody th")]


def test_a_live_quickstart_from_step_0_to_its_end(browser: Any, serve: Callable, tmp_path: Path) -> None:
    address = serve(tmp_path)
    show(browser, address)
    assert "no run" in until(lambda: text(browser, "#state").replace("Reading the runs.", ""))
    process = quickstart(tmp_path, max_steps=6, fixed_eval_steps=3)
    folder = tmp_path / "quickstart"
    until(lambda: "quickstart: running, step 0" in text(browser, "#state"), 120)  # the open page notices it
    until(lambda: "evaluation" in text(browser, "#stage") or "rollout" in text(browser, "#stage"), 120)
    steps = []
    while "ended" not in (state := text(browser, "#state")):
        step = int(state.rsplit("step ", 1)[1])
        steps += [] if steps and steps[-1] == step else [step]
        assert len(steps) < 20 and process.poll() in (None, 0)
        time.sleep(0.05)
    assert steps[0] == 0 and steps == sorted(steps) and len(steps) >= 4
    assert process.wait(60) == 0
    until(lambda: facts(browser, ".tiles").get("state") == "ended")
    last, tiles = rows_of(folder)[-1], facts(browser, ".tiles")
    assert tiles["step"] == "6 / 6" and tiles["accuracy"] == f"{100 * last['accuracy']:.1f} %"
    assert float(tiles["reward"]) == pytest.approx(last["reward"], rel=1e-3)
    assert float(tiles["tokens/s"].replace(",", "")) == pytest.approx(last["tokens_per_s"], rel=1e-3)
    assert float(tiles["peak memory"].removesuffix(" GB")) == pytest.approx(last["peak_memory_gb"], rel=1e-3)
    newest = json.loads((folder / "status.json").read_text())["newest"][1]
    assert text(browser, "#newest").strip() == newest.strip() != ""
    assert count(browser, ".finding")

    show(browser, address, runs="quickstart", view="curves")
    until(lambda: count(browser, "figure") > 8)
    assert shown_steps(browser, "reward") == [1, 2, 3, 4, 5, 6]
    for key in ("reward", "grad_norm", "completions/mean_length"):
        label = str(attribute(browser, f"figure[data-metric='{key}'] svg", "aria-label"))
        assert float(label.rsplit(" ", 1)[1].replace(",", "")) == pytest.approx(last[key], rel=1e-3)
    show(browser, address, runs="quickstart", view="groups", step="6")
    until(lambda: count(browser, ".tokens span"))
    rows = completions_of(folder, 6)
    assert count(browser, ".list button") == len({row["problem"] for row in rows}) == 16
    own = [row for row in rows if row["problem"] == text(browser, "section h2")]
    assert count(browser, ".tokens span") == sum(row["length"] for row in own)
    show(browser, address, runs="quickstart", view="evaluation")
    until(lambda: count(browser, ".pairs tbody tr") == 30)
    assert is_quiet(browser)


def test_a_run_that_is_killed_and_resumed(browser: Any, serve: Callable, tmp_path: Path) -> None:
    settings = {"max_steps": 8, "save_steps": 2, "fixed_eval_steps": 4}
    folder = tmp_path / "quickstart"
    process = quickstart(tmp_path, **settings)
    until(lambda: (folder / "metrics.jsonl").is_file(), 120)
    show(browser, serve(tmp_path), runs="quickstart", view="curves")
    until(lambda: "step 5" in text(browser, "#state"), 120)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = rows_of(folder)
    assert shown_steps(browser, "reward") == [row["step"] for row in before]
    until(lambda: "silent" in text(browser, "#state"), 60)
    click(browser, "nav button")
    until(lambda: "No sign of life" in text(browser, "#stage"))
    process = quickstart(tmp_path, auto_resume="true", overwrite_output_dir="false", **settings)
    until(lambda: "running" in text(browser, "#state"), 120)
    until(lambda: "ended" in text(browser, "#state") and "step 8" in text(browser, "#state"), 120)
    assert process.wait(60) == 0
    until(lambda: facts(browser, ".tiles").get("resumed") == "at step 4")
    click(browser, "nav button:nth-child(2)")
    until(lambda: count(browser, "figure[data-metric='reward']"))
    assert shown_steps(browser, "reward") == [1, 2, 3, 4, 5, 6, 7, 8]
    shown = [float(cell) for cell in texts(browser, "figure[data-metric='reward'] tbody td")]
    rows = rows_of(folder)
    assert shown == pytest.approx([row["reward"] for row in rows], rel=1e-3)
    assert [row["reward"] for row in before] == [row["reward"] for row in rows[: len(before)]]  # bit-exact
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
        show(browser, address, runs="bad", view=view, step="3", coloring="rule")
        until(lambda selector=selector: "window.hit=1" in text(browser, selector))
        assert browser.execute_script("return window.hit") is None
        assert count(browser, "main img, main script, main iframe, main svg[onload], main b b") == 0
        assert not {"\u202e", "\x1b", "\x00", "\u2066"} & set(text(browser)), view
    show(browser, address, runs="bad", view="groups", step="3")
    until(lambda: count(browser, ".completion") == 3)
    assert count(browser, ".tokens span") == 3
    # A million characters are cut, and there on demand; the page stays as wide as the window.
    assert len(texts(browser, ".completion pre")[0]) < 30_000
    click(browser, ".completion pre button")
    assert len(texts(browser, ".completion pre")[0]) == 1_000_000
    assert right_to_left.strip() in text(browser, ".completion:nth-child(3)")
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert is_quiet(browser)


def test_fifty_runs_overlaid_and_a_grid(browser: Any, serve: Callable, tmp_path: Path) -> None:
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
    show(browser, address, view="compare")
    until(lambda: count(browser, "#runs tbody tr") == 50 and count(browser, "#grid tbody tr") == 11)
    assert "40 of 55 runs" in text(browser, "#matches")
    until(lambda: "step 47" in text(browser, "#grid tbody tr"))  # the run of 3 + 44 steps has not ended
    line = texts(browser, "#grid tbody tr:nth-child(3) > *")
    assert line[0] == "learning_rate=1e-2" and line[1:5] == [
        f"25.0 % \u2192 {n}.0 %" for n in (2, 13, 24, 35)
    ]
    assert line[6] == "18.5 %" and line[7].startswith("-6.5 [")
    waiting = [cell for cell in texts(browser, "#grid tbody td") if cell == "waiting"]
    assert len(waiting) == 5
    click(browser, ".controls button")  # all curves: 50 runs over one connection
    legend = "figure[data-metric='reward'] .legend > span"
    until(lambda: count(browser, legend) == 50)
    label = str(attribute(browser, "figure[data-metric='reward'] svg", "aria-label"))
    for number in (7, 44):
        name = f"compare/runs/learning_rate=1e-{number % 11}_seed={number // 11}"
        assert f"{name}: {float(f'{math.sin((3 + number) / 100):.4g}')}" in label
    # A run that is written anew, as at a resume, with fewer rows.
    name = "compare/runs/learning_rate=1e-7_seed=0"
    show(browser, address, runs=name, view="curves")
    until(lambda: "step 10" in text(browser, "#state"))
    shutil.rmtree(tmp_path / name)
    make_run(tmp_path / name, num_steps=2)
    until(lambda: "step 2" in text(browser, "#state"))
    assert is_quiet(browser)


def test_five_thousand_steps_open_in_two_seconds_and_scroll(
    browser: Any, serve: Callable, tmp_path: Path
) -> None:
    make_run(tmp_path / "long", num_steps=5000)
    address = serve(tmp_path)
    seconds = []
    for _ in range(3):  # the best: other programs of the machine only slow it down
        browser.get("about:blank")
        started_at = time.monotonic()
        browser.get(f"{address}/#runs=long&view=curves")
        until(lambda: "step 5000" in text(browser, "#state") and count(browser, "figure path"))
        seconds.append(time.monotonic() - started_at)
    assert min(seconds) < 2.0
    browser.execute_script(
        "[...document.querySelectorAll('button')].find((b) => b.innerText.startsWith('all ')).click()"
    )
    until(lambda: count(browser, "figure") > 40)
    frames = browser.execute_async_script(
        "const done = arguments[0], times = []; let last = performance.now();"
        "const step = (now) => { times.push(now - last); last = now; scrollBy(0, 80);"
        "  times.length < 40 ? requestAnimationFrame(step) : done(times); }; requestAnimationFrame(step)"
    )
    assert float(np.median(frames)) < 100 and browser.execute_script("return scrollY") > 1000
    label = str(attribute(browser, "figure[data-metric='reward'] svg", "aria-label"))
    assert float(label.rsplit(" ", 1)[1]) == pytest.approx(math.sin(50), rel=1e-3)
