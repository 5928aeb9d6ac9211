"""The preflight: what it measures by hand, what it stops, and that a run is the same with and without it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.config.test_recipes import CONFIG, KLONG, OWN, RECIPES
from tests.support.runs import rows, run, weights, words
from whetstone import __main__ as cli
from whetstone.config import build, load
from whetstone.errors import UserError
from whetstone.model.policy import load_policy
from whetstone.parallel.mesh import SINGLE
from whetstone.run import preflight as preflight_module
from whetstone.run.check import check
from whetstone.run.preflight import Preflight, compare_logprobs, judge, measure, preflight
from whetstone.terminal.findings import Finding, Status
from whetstone.types import Completion, Finish, Group, Problem, Rollout, Score, Turn

HARD = "{chain_sum: {config: {min_terms: 6, max_terms: 6, min_digits: 6, max_digits: 6}}}"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rollout(
    reward: float, length: int = 3, limit: int = 8, answer: str | None = "5", **score: Any
) -> Rollout:
    completion = Completion(
        token_ids=(7,) * length,
        logprobs=(-1.0,) * length,
        finish=Finish.LENGTH if length == limit else Finish.STOP,
        policy_version=0,
    )
    parts = {"correct": float(reward >= 1), "accuracy": reward}
    scored = Score(**{"reward": reward, "parts": parts, "answer": answer, **score})
    return Rollout(prompt_ids=(1, 2), turns=(Turn(completion=completion),), text="", score=scored)


def group(*rollouts: Rollout) -> Group:
    problem = Problem(id="gcd/train/0", task="gcd", messages=({"role": "user", "content": "?"},), answer="5")
    return Group(problem=problem, rollouts=rollouts)


def statuses(groups: list[Group], **keys: Any) -> dict[str, Status]:
    config = build({"max_completion_length": 8, "num_generations": 4, **keys})
    return {finding.name: finding.status for finding in judge(config, groups, measure(config, groups))}


def test_the_measurements_by_hand() -> None:
    mixed = group(rollout(1.0), rollout(0.0, length=8, answer=None), rollout(0.0), rollout(0.5, length=5))
    failed = group(
        *[rollout(0.0, failure="timeout", answer=None)] * 2, rollout(0.0), rollout(0.0, answer=None)
    )
    numbers = measure(build({"max_completion_length": 8, "num_generations": 4}), [mixed, failed])
    assert numbers == {
        "num_prompts": 2,
        "num_completions": 8,
        "truncated_ratio": 1 / 8,
        "mean_length": (5 * 3 + 8 + 3 + 5) / 8,
        "p90_length": 8.0,
        "max_completion_length": 8,
        "scoring_failures": 2,
        "no_answer_ratio": 2 / 6,
        "accuracy": 1 / 8,
        "reward_variance_ratio": 1 / 2,
    }


def test_what_is_ok_a_warning_and_a_problem() -> None:
    good = group(rollout(1.0), rollout(0.0), rollout(0.0), rollout(0.0))
    wrong = group(*[rollout(0.0)] * 4)
    right = group(*[rollout(1.0)] * 4)
    assert set(statuses([good]).values()) == {Status.OK}
    assert statuses([wrong, wrong])["rewards"] is Status.PROBLEM
    assert statuses([right, right])["rewards"] is Status.PROBLEM
    assert statuses([good, *[wrong] * 9])["rewards"] is Status.WARNING
    # These estimators compare completions of different prompts.
    assert statuses([right, wrong], advantage="group")["rewards"] is Status.PROBLEM
    assert statuses([right, wrong], advantage="reinforce_pp")["rewards"] is Status.OK
    cut = [rollout(float(n), length=8) for n in range(2)]
    assert statuses([group(*cut, *cut)])["truncated"] is Status.PROBLEM
    assert statuses([group(*cut, rollout(0.0), rollout(0.0))])["truncated"] is Status.WARNING
    assert statuses([group(*[rollout(n / 4, answer=None) for n in range(4)])])["answers"] is Status.WARNING
    failed = group(*[rollout(0.0, failure="error: x")] * 3, rollout(1.0))
    assert statuses([failed])["scoring"] is Status.PROBLEM
    assert statuses([failed], max_reward_failure_fraction=1.0)["scoring"] is Status.WARNING


def test_solutions_are_judged_by_their_length_alone() -> None:
    solution = rollout(0.0, length=8, parts={}, answer=None)
    assert statuses([group(solution)], loss_type="sft") == {"truncated": Status.PROBLEM, "length": Status.OK}
    sampled = statuses([group(*[rollout(0.0)] * 4)], loss_type="sft", rejection_sampling=True)
    assert "rewards" not in sampled and sampled["correct"] is Status.WARNING


def test_logprobs_that_are_off_by_one_are_found() -> None:
    config = build({"max_completion_length": 8, "num_generations": 1})
    policy = load_policy(config.model)
    groups = [group(rollout(1.0))]
    numbers = compare_logprobs(config, policy, groups)
    assert numbers["logprob_difference_max"] > 0.1  # -1 is not what the model computes
    findings = judge(config, groups, measure(config, groups) | numbers)
    assert {finding.name: finding.status for finding in findings}["logprobs"] is Status.PROBLEM


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("truncated", {"max_completion_length": 2}),
        ("rewards", {"datasets": HARD, "max_completion_length": 64, "num_generations": 2}),
    ],
)
def test_a_hopeless_run_is_stopped_before_any_update(
    tmp_path: Path, name: str, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["train", *words(tmp_path, **changes, preflight="stop")]) == 2
    written = json.loads((tmp_path / "run" / "preflight.json").read_text(encoding="utf-8"))
    assert written["stops"]
    assert next(f["name"] for f in written["findings"] if f["status"] == "problem") == name
    assert "preflight=warn" in capsys.readouterr().err
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert not left & {"final_model", "eval_results", "completions"}
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert not metrics.exists() or metrics.read_text() == ""


def test_check_has_exit_code_1_where_training_would_stop(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["model_name_or_path=pebble", "reward_workers=1", "eval_num_samples=0"]
    assert cli.run(["check", "quickstart", *settings, "max_completion_length=2"]) == 1
    shown = capsys.readouterr().out
    assert "problem  truncated" in shown and "<|assistant|>" in shown
    assert "would be stopped" in shown
    assert cli.run(["check", "quickstart", *settings, "max_completion_length=2", "preflight=warn"]) == 0
    assert "Training would start." in capsys.readouterr().out


def test_the_key_decides_whether_a_problem_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = Finding(name="rewards", status=Status.PROBLEM, text="all wrong", remedy="Change it.")
    numbers = {"num_completions": 8, "num_prompts": 2, "truncated_ratio": 0.0}
    result = Preflight(findings=(finding,), measurements=numbers, problem="gcd/train/0", prompt="?")
    monkeypatch.setattr(preflight_module, "examine", lambda *_: result)
    policy: Any = SimpleNamespace(ranks=SINGLE)
    source: Any = None
    for value, has_file in ((False, False), ("warn", True)):  # YAML reads `off` as false
        preflight(build({"preflight": value}), source, policy, tmp_path)
        assert (tmp_path / "preflight.json").exists() is has_file
    with pytest.raises(UserError, match="all wrong"):
        preflight(build({}), source, policy, tmp_path)


SHORT = {"eval_num_samples": 2, "save_steps": 1, "max_steps": 1}


def test_a_run_is_the_same_with_and_without(tmp_path: Path) -> None:
    for name in ("stop", "off"):
        run(tmp_path / name, preflight=name, **SHORT)
    for kind in ("train", "eval"):
        assert rows(tmp_path / "stop", kind) == rows(tmp_path / "off", kind) != []
    ours, theirs = (weights(tmp_path / name / "run" / "final_model") for name in ("stop", "off"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    files = [(tmp_path / name / "run" / "preflight.json").exists() for name in ("stop", "off")]
    assert files == [True, False]


@pytest.mark.slow
def test_a_resumed_run_has_no_preflight(tmp_path: Path) -> None:
    run(tmp_path, preflight="off", **SHORT)
    run(tmp_path, preflight="stop", **{**SHORT, "max_steps": 2}, auto_resume=True)
    assert rows(tmp_path, "train")[-1]["step"] == 2
    assert not (tmp_path / "run" / "preflight.json").exists()


# The embedded model solves sums, words and letters; of the other tasks it never solves one, so rewards do not
# differ there. Its context has 512 tokens, and the code tasks ask for more than it can write.
SOLVES = {"quickstart", "course_cpu", "sums"}


def cases() -> list[str]:
    return [str(recipe) for recipe in RECIPES if str(recipe) != "zero3"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", cases())
def test_each_recipe(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In full where pebble can answer; elsewhere scoring, lengths and logprobs, but not `rewards`."""
    monkeypatch.chdir(tmp_path)
    sums = [{"question": f"What is {a} + 5?", "answer": str(a + 5)} for a in range(40)]
    (tmp_path / "rows.json").write_text(json.dumps(sums), encoding="utf-8")
    settings = {"model_name_or_path": "pebble", "bf16": "false", "reward_workers": 1, "eval_num_samples": 0}
    settings |= KLONG if recipe.startswith("q/") else OWN.get(recipe, {})
    if recipe not in SOLVES:
        limits = {"max_prompt_length": 2048, "max_completion_length": 24, "overlong_buffer_length": 4}
        settings |= {**limits, "num_generations": 2, "prompts_per_step": 2}
    loaded = load(CONFIG / f"{recipe}.yaml", [f"{key}={value}" for key, value in settings.items()])
    result, is_main = check(loaded)
    found = {finding.name: finding.status for finding in result.findings}
    assert is_main and result.prompt and result.measurements["num_prompts"] >= 2
    assert found["length"] is Status.OK
    if recipe in SOLVES:
        assert not result.stops and result.measurements["reward_variance_ratio"] > 0.2
    if not loaded.config.loss.is_supervised and not loaded.config.update.sft_steps:
        assert found["scoring"] is Status.OK and found["logprobs"] is Status.OK


@pytest.mark.slow
def test_two_ranks_agree_to_stop(tmp_path: Path) -> None:
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    settings = words(tmp_path, max_completion_length=2, preflight="stop")
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "-m", "whetstone", "train", *settings],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=200,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and "preflight=warn" in done.stderr, done.stderr
    assert json.loads((tmp_path / "run" / "preflight.json").read_text())["stops"]
    assert not (tmp_path / "run" / "final_model").exists()
