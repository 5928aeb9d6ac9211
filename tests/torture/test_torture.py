"""The campaign itself: it finds what it should, counts right, goes on where it stopped, and still runs."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.torture import hostile_answers
from tests.torture.campaign import interleave
from tests.torture.compare import differences
from tests.torture.inputs import Case, judge
from tests.torture.leaks import Use, grown
from tests.torture.moments import Moment, Watcher
from tests.torture.programs import ALL
from tests.torture.trial import Outcome, Part
from tests.torture.variants import VARIANTS

ROOT = Path(__file__).resolve().parents[2]


def command(folder: Path, *words: str, timeout_s: float) -> tuple[int, dict]:
    """A campaign in a process of its own: this one has computed with torch, which forks badly."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.torture", "--folder", str(folder), *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert (folder / "table.json").is_file(), done.stdout[-2000:] + done.stderr[-2000:]
    return done.returncode, json.loads((folder / "table.json").read_text())


def test_a_tiny_slice(tmp_path: Path) -> None:
    code, summary = command(tmp_path / "c", "--only", "programs,commands", "--first", "1", timeout_s=300)
    assert code == 0, summary["losses"]
    commands = next(part for part in summary["parts"] if part["part"] == "commands")
    assert (commands["tried"], commands["survived"], commands["lost"]) == (1, 1, 0)
    assert summary["complete"]


@pytest.mark.slow
def test_a_slice_of_ten_minutes(tmp_path: Path) -> None:
    code, summary = command(tmp_path / "c", "--minutes", "10", timeout_s=3000)
    assert code == 0, summary["losses"]
    assert sum(part["tried"] for part in summary["parts"]) > 50


def test_there_is_enough_to_try() -> None:
    assert len(VARIANTS) >= 9
    assert len(ALL) >= 120 and len({hostile.name for hostile in ALL}) == len(ALL)
    canary = hostile_answers.Canary(file="/x/y", port=1, variable="V")
    texts = [one.text for one in hostile_answers.texts(canary)]
    assert len(set(texts)) == len(texts) >= 200
    other = hostile_answers.Canary(file="/a/b", port=2, variable="W")
    assert len(list(hostile_answers.texts(other))) == len(texts)


# ---- what it finds -----------------------------------------------------------------------------------------


def make_run(folder: Path) -> Path:
    """The files of a run that are compared."""
    rows = [("eval", 0), ("train", 1), ("train", 2), ("eval", 2)]
    lines = [
        json.dumps({"kind": kind, "step": step, "reward": step / 2, "time/update": time.time()})
        for kind, step in rows
    ]
    files = {
        "final_model/model.safetensors": "weights",
        "checkpoint-2/model.safetensors": "weights",
        "metrics.jsonl": "\n".join(lines) + "\n",
        "eval_results/eval_step_2.json": json.dumps({"accuracy": 0.5, "seconds": time.time()}),
        "completions/step_1.jsonl": json.dumps({"text": "a"}) + "\n",
        "train_results.json": json.dumps({"steps": 2, "seconds": time.time()}),
        "report.html": "x",
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def _append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


DAMAGES = {
    "bit-equal": lambda run: (run / "final_model" / "model.safetensors").write_text("weighty"),
    "checkpoint-2/model": lambda run: (run / "checkpoint-2" / "model.safetensors").write_text("x"),
    "rows too many [('eval', 2)]": lambda run: _append(
        run / "metrics.jsonl", '{"kind": "eval", "step": 2}\n'
    ),
    "rows lost": lambda run: (run / "metrics.jsonl").write_text(""),
    "half a line": lambda run: _append(run / "metrics.jsonl", '{"kind": "tr'),
    "eval_step_2.json differs": lambda run: (run / "eval_results" / "eval_step_2.json").write_text("{}"),
    "checkpoints left": lambda run: (run / "checkpoint-1").mkdir(),
    ".writing is left behind": lambda run: (run / ".checkpoint-3.writing").mkdir(),
    "report.html": lambda run: (run / "report.html").unlink(),
    "train_results.json differs": lambda run: (run / "train_results.json").unlink(),
    "final_model has the files": lambda run: shutil.rmtree(run / "final_model"),
}


@pytest.mark.parametrize("found", DAMAGES)
def test_a_run_that_differs_is_seen(tmp_path: Path, found: str) -> None:
    whole, resumed = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    assert differences(whole, resumed) == []
    DAMAGES[found](resumed)
    assert any(found in one for one in differences(whole, resumed)), differences(whole, resumed)


def test_a_moment_is_seen_once_it_has_come_and_not_before(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    watcher = Watcher(tmp_path, Moment(event="checkpoint renamed", repeats=2), last_step=4)
    assert not watcher.has_come()  # what was there before does not count
    (tmp_path / ".checkpoint-2.writing").mkdir()
    assert not watcher.has_come()
    (tmp_path / ".checkpoint-2.writing").rename(tmp_path / "checkpoint-2")
    assert not watcher.has_come()
    (tmp_path / "checkpoint-3").mkdir()
    assert watcher.has_come()


@pytest.mark.parametrize(
    ("code", "output", "count"),
    [
        (2, "loading\nwhet: There is no such key: leave it out.\n", 0),
        (2, "nothing\n", 1),
        (2, "whet: one.\nwhet: two.\n", 1),
        (1, "Traceback (most recent call last):\nKeyError\n", 2),
        (-11, "", 1),
        (0, "done\n", 1),
    ],
)
def test_how_a_command_ended_is_judged(code: int, output: str, count: int) -> None:
    assert len(judge(Case(name="x", argv=()), code, output)) == count


def test_growth_is_told_from_noise() -> None:
    def use(step: int, leak_mb: float, leak: float) -> Use:
        noise = step % 7
        return Use(
            memory_mb=400 + noise + leak_mb * step,
            scorers_mb=90.0,
            descriptors=7 + (step % 25 == 0) + int(leak * step),
            threads=3,
            processes=1,
        )

    assert grown({step: use(step, 0.0, 0.0) for step in range(1, 501)}) == []
    assert len(grown({step: use(step, 0.2, 0.0) for step in range(1, 501)})) == 1
    assert len(grown({step: use(step, 0.0, 0.02) for step in range(1, 501)})) == 1


# ---- how it counts -----------------------------------------------------------------------------------------


def toy_campaign(folder: Path, seed: int, *more: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "tests.torture.toy", str(folder), str(seed), *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def test_losses_are_counted_and_kept_and_a_stopped_campaign_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    done = toy_campaign(folder, 7)
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "table.json").read_text())
    (part,) = summary["parts"]
    assert (part["trials"], part["survived"], part["lost"], part["skipped"]) == (5, 2, 3, 1)
    losses = {loss["trial"]: loss for loss in summary["losses"]}
    assert losses.keys() == {"toy/loses", "toy/raises", "toy/hangs"}
    assert losses["toy/loses"]["reproduce"] == "python -m tests.torture --seed 7 --trial toy/loses"
    assert "RuntimeError" in losses["toy/raises"]["losses"][0]
    assert (folder / "trials" / "toy-loses" / "work" / "trace").is_file()
    assert not (folder / "trials" / "toy-holds").exists()
    assert "| 5 | 2 | 3 |" in (folder / "table.md").read_text()
    state = folder / "state.jsonl"
    lines = state.read_text().splitlines()
    kept = [json.loads(line)["trial"] for line in lines[1:3]]
    state.write_text("\n".join(lines[:3]) + '\n{"trial": "toy/ra')  # killed while it wrote
    traces = folder / "traces"
    traces.write_text("")
    assert toy_campaign(folder, 7, "resume").returncode == 0
    again = traces.read_text().split()
    assert len(again) == 4 and not {f"toy/{name}" for name in again} & set(kept)
    assert json.loads((folder / "table.json").read_text())["complete"]
    assert toy_campaign(folder, 8, "resume").returncode != 0


def test_any_beginning_has_a_share_of_every_part() -> None:
    def part(name: str, count: int) -> Part:
        return Part(
            name=name,
            unit="x",
            summary="",
            names=lambda seed: [str(number) for number in range(count)],
            run=lambda name, setting: Outcome(),
            limit_s=1,
        )

    plan = interleave([part("many", 100), part("few", 10)], 1)
    beginning = [one.name for one, _ in plan[:55]]
    assert beginning.count("few") == 5 and len(plan) == 110
    assert len(interleave([part("many", 100), part("few", 10)], 1, first=2)) == 4
