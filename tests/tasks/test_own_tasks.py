"""Tasks of the user's own, loaded from a file: training, evaluation, `whet tasks`, errors."""

import json
from pathlib import Path

import pytest

from whetstone.__main__ import main
from whetstone.config import build, load
from whetstone.errors import UserError
from whetstone.run.metrics import read_rows
from whetstone.tasks.mixture import build_tasks, check_gold
from whetstone.tasks.scoring.pool import Scorer
from whetstone.tasks.scoring.process import ScoringRequest
from whetstone.train import train

CODE = """
import os
from whetstone.tasks.base import Task
from whetstone.types import TaskScore

class Sums(Task):
    generated = True
    default_settings = {"low": 1}

    def problem(self, index):
        a, b = self.settings.get("low", 1) + index % 7, self.seed % 5 + index
        return self.make_problem(index, f"{a} + {b}", answer=a + b)

    def gold(self, problem):
        return str(problem.answer)

    def score(self, problem, text):
        if text == "environment":
            return TaskScore(correct=False, reward=float("WHET_TEST" in os.environ))
        if text == "bug":
            raise ValueError("a bug")
        correct = text.strip() == str(problem.answer)
        return TaskScore(correct=correct, reward=2.0 * correct, answer=text.strip())

class IsolatedSums(Sums):
    isolated = True
    failure_reward = -1.0

class Unfinished(Task):
    pass

class Broken(Sums):
    def __init__(self, *arguments):
        raise KeyError("low")

def not_a_class():
    pass
"""
REWARD = """
def first(completions, log_extra, **columns):
    log_extra("first_letter", [c[-1]["content"][:1] for c in completions])
    return [0.5 + 0.1 * (columns["answer"][0] > 0)] * len(completions)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_task.py").write_text(CODE)
    (tmp_path / "my_reward.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WHET_TEST", "1")
    return tmp_path


def test_a_task_from_a_file_trains_and_is_evaluated(folder: Path) -> None:
    settings = {
        "model_name_or_path": "pebble",
        "datasets": "{my_task.py:Sums: {config: {low: 2}}, my_task.py:Sums/b: {config: {low: 50}}}",
        "reward_funcs": "[accuracy, my_reward.py:first]",
        "max_steps": 2,
        "prompts_per_step": 2,
        "num_generations": 2,
        "max_completion_length": 8,
        "eval_num_samples": 4,
        "eval_num_examples_to_print": 0,
        "log_completions_steps": 1,
        "reward_workers": 1,
        "save_strategy": "no",
        "preflight": "off",
        "output_dir": folder / "outputs",
        "run_name": "own",
    }
    train(load(None, [f"{key}={value}" for key, value in settings.items()]))
    run = folder / "outputs" / "own"
    rows = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2]
    assert [row["step"] for row in rows if row["kind"] == "eval"] == [0, 2]
    lines = [json.loads(line) for line in (run / "completions" / "step_1.jsonl").read_text().splitlines()]
    assert {line["task"] for line in lines} == {"my_task.py:Sums", "my_task.py:Sums/b"}
    assert all(line["extra"] == {"first_letter": line["completion"][:1]} for line in lines)
    assert all(line["parts"]["first"] == 0.6 for line in lines)


def test_whet_tasks_shows_problems_of_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["tasks", "my_task.py:Sums", "low=3"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "low" in out and "my_task.py:Sums/train/000000" in out and "correct 1, accuracy 2" in out


@pytest.mark.parametrize(("name", "sees_environment"), [("Sums", 1.0), ("IsolatedSums", 0.0)])
def test_it_is_scored_where_it_says(folder: Path, name: str, sees_environment: float) -> None:
    task = f"my_task.py:{name}"
    config = build(
        {
            "datasets": {task: {}},
            "reward_workers": 1,
            "max_reward_failure_fraction": 0.9,
            "eval_num_samples": 2,
        }
    )
    assert config.tasks.reward_funcs == ["accuracy"]  # no format: its prompts ask for no tags
    mixture = build_tasks(config, "train")
    check_gold(mixture)
    problem = mixture.problem(0)
    with Scorer(config) as scorer:
        for text in (str(problem.answer), "environment", "bug"):
            scorer.submit(ScoringRequest(problem=problem, text=text, completion_ids=(1,), truncated=False))
        right, environment, bug = scorer.gather()
    assert (right.reward, right.parts["correct"], right.failure) == (2.0, 1.0, None)
    assert environment.reward == sees_environment
    assert (bug.failure or "").startswith("error: ValueError: a bug (") and ".py, line " in (
        bug.failure or ""
    )
    assert bug.reward == (-1.0 if name == "IsolatedSums" else 0.0)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("my_task.py:Sum", "'Sum'"),
        ("nowhere.py:Sums", r"nowhere\.py"),
        ("my_task.py:not_a_class", "not_a_class.*Task"),
        ("my_task.py:Unfinished", "abstract"),
        ("my_task.py:Broken", "KeyError.*low.*my_task.py, line"),
        ("bad.py:Sums", "ModuleNotFoundError"),
    ],
)
def test_what_is_wrong_is_one_sentence(folder: Path, name: str, complaint: str) -> None:
    (folder / "bad.py").write_text("import no_such_module_anywhere\n" + CODE)
    with pytest.raises(UserError, match=complaint) as caught:
        build_tasks(build({"datasets": {name: {}}}), "train")
    assert "\n" not in str(caught.value)


def test_it_has_no_curriculum_unless_it_says_so(folder: Path) -> None:
    with pytest.raises(UserError, match=r"my_task\.py:Sums.*curriculum"):
        build_tasks(build({"datasets": {"my_task.py:Sums": {"curriculum": True}}}), "train")
