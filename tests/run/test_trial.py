"""A failure of the user's own code is reported as what it is: before the model is loaded, in the preflight,
and after the run.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.environments import bad
from tests.run.test_preflight import group, rollout
from whetstone.config import build
from whetstone.diagnosis.explain import diagnose, load_history
from whetstone.errors import UserError
from whetstone.parallel.mesh import SINGLE
from whetstone.run.preflight import Preflight, judge, measure
from whetstone.run.setup import make_pool
from whetstone.run.trial import check_own_code, try_own_code
from whetstone.tasks.mixture import build_tasks
from whetstone.tasks.scoring.pool import Scorer
from whetstone.terminal.findings import Status
from whetstone.types import Episode, Finish

REASON = "ValueError: boom in step (dice.py, line 18)"
REWARDS = """
def lacks_a_column(completions, foo):
    return [1.0] * len(completions)

def indexes_a_list(completions, **columns):
    return [float(completion["content"]) for completion in completions]

def nan(completions, **columns):
    return [float("nan")] * len(completions)

def fine(completions, **columns):
    return [1.0] * len(completions)
"""


def test_failed_episodes_come_before_what_follows_from_them() -> None:
    failed = Episode(finish=Finish.TOOL_ERROR, messages=(), rewards=(), error=REASON)
    whole = group(*[replace(rollout(0.0, length=8), episode=failed)] * 3, rollout(0.0))
    whole = replace(whole, problem=replace(whole.problem, environment="dice.py:Raises"))
    config = build({"max_completion_length": 8, "num_generations": 4})
    findings = judge(config, [whole], measure(config, [whole]))
    assert (findings[0].name, findings[0].status) == ("environment", Status.PROBLEM)
    assert findings[0].text == f"3 of 3 episodes ended by a failure of the environment (first: {REASON})"
    assert "rewards" not in {finding.name for finding in findings}
    text = str(Preflight(findings=tuple(findings), measurements={}, problem="", prompt="").error())
    assert REASON in text and "nothing can be learned" not in text and "preflight=" not in text


@pytest.mark.parametrize(
    ("kind", "status", "text"),
    [
        (bad.Good, None, ""),
        (bad.ReturnsFourValues, Status.PROBLEM, "step of ReturnsFourValues returned a tuple of 4 instead of"),
        (bad.StepRaises, Status.WARNING, "failed in its first turn: KeyError: 'missing' (bad.py, line "),
    ],
)
def test_an_environment_is_tried_before_the_model_is_loaded(kind, status, text, caplog) -> None:
    name = f"{Path(bad.__file__)}:{kind.__name__}"
    config = build({"eval_num_samples": 0, "datasets": {name: {}}, "environment_timeout_s": 20})
    tasks = build_tasks(config, "train")
    findings = try_own_code(config, tasks, None, SINGLE, make_pool)
    assert [finding.status for finding in findings] == ([] if status is None else [status])
    assert all(text in finding.text for finding in findings)
    if status is Status.PROBLEM:
        with pytest.raises(UserError, match="trial of your own code failed: "):
            check_own_code(config, tasks, None, SINGLE, make_pool)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fine", ""),
        ("lacks_a_column", "required positional argument: 'foo' (own.py, line 2)"),
        ("indexes_a_list", "indices must be integers or slices, not str (own.py, line 6)"),
        ("nan", "nan returned nan, not a finite number"),
    ],
)
def test_a_reward_function_is_called_before_the_model_is_loaded(tmp_path, name, text) -> None:
    (tmp_path / "own.py").write_text(REWARDS)
    keys = {"eval_num_samples": 0, "datasets": {"chain_sum": {}}, "reward_workers": 1}
    config = build({**keys, "reward_funcs": [f"{tmp_path / 'own.py'}:{name}"]})
    with Scorer(config) as scorer:
        findings = try_own_code(config, build_tasks(config, "train"), scorer, SINGLE, make_pool)
    assert [finding.status for finding in findings] == [Status.PROBLEM] * bool(text)
    assert all(text in finding.text for finding in findings)


def test_the_diagnosis_begins_with_failures_and_the_first_reason(tmp_path) -> None:
    rows = [{"kind": "train", "step": step, "accuracy": 0.0, "reward": 0.0} for step in range(1, 7)]
    for row in rows:
        row |= {"episodes/failed_ratio": 0.5, "scoring_failures": float(row["step"] == 2)}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.yaml").write_text("num_generations: 4\nprompts_per_step: 2\n")
    (tmp_path / "completions").mkdir()
    completions = [{"completion": "x"}, {"environment_error": REASON}, {"failure": "error: \x1bnan"}]
    text = "".join(json.dumps(completion) + "\n" for completion in completions)
    (tmp_path / "completions" / "step_2.jsonl").write_text(text)
    verdict = diagnose(*load_history(tmp_path))[0]
    assert verdict.title == "The environment failed in some episodes" and REASON in verdict.evidence
    assert load_history(tmp_path)[0][-1]["failures"]["scoring"] == "error: \\x1bnan"
