"""Episodes on several ranks: the conversations of one process, whether ranks share problems or tokens."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import run_on
from tests.environments import waiting
from tests.support.runs import rows, run, weights

SETTINGS: dict[str, Any] = {
    "datasets": "{guess_number: {config: {high: 5, max_guesses: 3}}}",
    "max_steps": 3,
    "save_steps": 2,
    "prompts_per_step": 4,
    "max_completion_length": 24,
    "max_turns": 3,
    "eval_num_samples": 0,
    "log_completions_steps": 1,
}
# By its name alone, in its folder: problems are drawn by the task's name, and some of them end in a near tie.
SLOW = "{waiting.py:SlowGuess: {config: {high: 5, max_guesses: 3}}}"


@pytest.fixture(autouse=True)
def _folder_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(waiting.__file__).parent)


def on_two_ranks(folder: Path, **settings: Any) -> None:
    run_on(2, _train, folder, settings)


def _train(folder: Path, settings: dict[str, Any]) -> None:
    os.chdir(Path(waiting.__file__).parent)
    run(folder, **settings)


def conversations(folder: Path) -> list[Any]:
    """What was said in all steps, and what it earned."""
    files = [folder / "run" / "completions" / f"step_{step}.jsonl" for step in (1, 2, 3)]
    entries = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return [{k: v for k, v in entry.items() if not k.endswith(("seconds", "_s"))} for entry in entries]


@pytest.mark.parametrize(
    ("parallel", "changes"),
    [
        pytest.param({"tp_size": 2}, {"datasets": SLOW}, id="tensor parallel, slow environments"),
        pytest.param(
            {"tp_size": 2},
            {"datasets": SLOW, "full_determinism": True},
            id="tensor parallel, in rounds",
            marks=pytest.mark.slow,
        ),
        pytest.param({"tp_size": 2}, {}, id="tensor parallel", marks=pytest.mark.slow),
        pytest.param({}, {"datasets": SLOW}, id="data parallel, slow environments", marks=pytest.mark.slow),
        pytest.param({}, {}, id="data parallel", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_have_the_episodes_of_one_process(tmp_path, parallel, changes):
    settings = {**SETTINGS, **changes}
    on_two_ranks(tmp_path / "two", **settings, **parallel)
    run(tmp_path / "one", **settings)
    said = conversations(tmp_path / "one")
    assert conversations(tmp_path / "two") == said and len(said) == 3 * 16
    assert max(len(entry["turns"]) for entry in said) >= 3
    ours, theirs = rows(tmp_path / "two", "train"), rows(tmp_path / "one", "train")
    for mine, other in zip(ours, theirs, strict=True):
        for key in ("reward", "loss", "grad_norm"):
            assert mine[key] == pytest.approx(other[key], rel=1e-3, abs=1e-6), key
    two, one = (weights(tmp_path / name / "run" / "final_model") for name in ("two", "one"))
    worst = max(((two[name] - one[name]).norm() / one[name].norm()).item() for name in two)
    assert worst < 1e-3, worst


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"tp_size": 2}, {}], ids=["tensor parallel", "data parallel"])
def test_two_ranks_repeat_bit_for_bit_and_go_on_where_they_were_cut(tmp_path, parallel):
    settings = {**SETTINGS, "datasets": SLOW, "full_determinism": True, **parallel}
    for name in ("one", "other"):
        on_two_ranks(tmp_path / name, **settings)
    for lost in ("final_model", "checkpoint-3"):
        shutil.rmtree(tmp_path / "other" / "run" / lost)
    on_two_ranks(tmp_path / "other", auto_resume=True, **settings)
    one, other = (weights(tmp_path / name / "run" / "final_model") for name in ("one", "other"))
    assert all(torch.equal(one[name], other[name]) for name in one) and one.keys() == other.keys()
    assert rows(tmp_path / "one", "train") == rows(tmp_path / "other", "train")
