"""Countdown: always solvable, judged by exact arithmetic, from the generator or from rows."""

import json
import time
from pathlib import Path

import pytest

from whetstone.config import TaskSpec, build, load
from whetstone.errors import UserError
from whetstone.rewards.equations import check_equation
from whetstone.tasks.countdown import CountdownTask, Settings, solve
from whetstone.tasks.mixture import build_tasks, check_gold, eval_problems
from whetstone.tasks.registry import make_task
from whetstone.types import Problem

NO_EVALUATION = {"eval_num_samples": 0}


def make(settings: dict | None = None, split: str = "train", **keys) -> CountdownTask:
    config = build({**NO_EVALUATION, **keys})
    task = make_task(config, "countdown", TaskSpec(weight=1.0, config=settings or {}), split)
    assert isinstance(task, CountdownTask)
    return task


def test_500_problems_are_solvable_and_within_bounds():
    task = make({"min_numbers": 3, "max_numbers": 6, "max_value": 50, "min_target": 20, "max_target": 400})
    began = time.process_time()
    problems = [task.problem(i) for i in range(500)]
    assert time.process_time() - began < 10
    for problem in problems:
        numbers, target = problem.answer["numbers"], problem.answer["target"]
        assert 3 <= len(numbers) <= 6 and all(1 <= n <= 50 for n in numbers) and 20 <= target <= 400
        assert target not in numbers
        assert check_equation(problem.answer["solution"], numbers, target, exactly_once=True).correct
        assert task.score(problem, task.gold(problem)).parts == {"correct": 1.0, "accuracy": 1.0}
    assert len({p.question for p in problems}) > 490
    assert {op for p in problems for op in p.answer["solution"] if op in "+-*/"} == set("+-*/")


def fixed(numbers: list[int], target: int) -> Problem:
    return Problem(
        id="countdown/train/000000",
        task="countdown",
        messages=(),
        answer={"numbers": tuple(numbers), "target": target},
    )


@pytest.mark.parametrize(
    ("text", "correct", "accuracy"),
    [
        ("<answer> 42 + 19 + 4 * 1 = 64 </answer> no <answer> 42 + 19 + 4 - 1 = 64 </answer>", 1.0, 1.0),
        ("<answer> 42 + 19 + 4 - 1 = 64 </answer> or <answer> 42 + 19 + 4 * 1 = 64 </answer>", 0.0, 0.1),
        ("<answer>64</answer>", 0.0, 0.1),
        ("<answer>forty-two plus the rest</answer>", 0.0, 0.0),
        ("<answer>42 / (4 - 4)</answer>", 0.0, 0.1),
        ("42 + 19 + 4 - 1", 0.0, 0.0),
    ],
)
def test_the_last_answer_left_of_the_equals_sign_is_judged(text: str, correct: float, accuracy: float):
    assert make().score(fixed([1, 4, 42, 19], 64), text).parts == {"correct": correct, "accuracy": accuracy}


def test_base_reward_and_use_all_numbers_are_settings():
    problem, text = fixed([60, 4, 7], 64), "<answer>60 + 4</answer>"
    assert make().score(problem, text).reward == 1.0
    strict = make({"use_all_numbers": True, "base_reward": 0.25})
    assert strict.score(problem, text).parts == {"correct": 0.0, "accuracy": 0.25}
    assert "must be used exactly once" in strict.problem(0).question
    assert "can only be used once" in make().problem(0).question


def test_question_names_numbers_target_and_tags():
    problem = make().problem(0)
    question = problem.question
    assert question.startswith(
        f"Using the numbers {list(problem.answer['numbers'])}, create an equation that equals "
    )
    assert f"equals {problem.answer['target']}." in question
    assert "<think> </think>" in question and "<answer> </answer>" in question


def test_operators_can_be_restricted():
    task = make({"operators": ["+", "-"], "max_value": 30, "min_target": 5})
    for i in range(50):
        problem = task.problem(i)
        assert not set(problem.answer["solution"]) & set("*/")
    assert "(+, -)" in task.problem(0).question
    assert task.score(fixed([6, 2], 12), "<answer>6 * 2</answer>").parts["correct"] == 0.0


@pytest.mark.parametrize(("suffix", "column"), [(".json", "nums"), (".jsonl", "numbers"), (".csv", "nums")])
def test_rows_with_numbers_and_target(tmp_path: Path, suffix: str, column: str):
    rows = [{column: [19, 36, 55, 7], "target": 65}, {column: [63, 95, 96], "target": 64}]
    path = tmp_path / f"rows{suffix}"
    if suffix == ".csv":
        path.write_text('nums,target\n"[19, 36, 55, 7]",65\n63 95 96,64\n')
    else:
        path.write_text(json.dumps(rows) if suffix == ".json" else "\n".join(json.dumps(row) for row in rows))
    task = make({"path": str(path)})
    assert len(task) == 2 and not task.generated
    assert task.problem(1).answer == {"numbers": (63, 95, 96), "target": 64}
    assert task.score(task.problem(1), "<answer>63 + 96 - 95</answer>").parts["correct"] == 1.0
    for index in range(2):  # gold answers of rows are found by search
        problem = task.problem(index)
        assert task.score(problem, task.gold(problem)).parts["correct"] == 1.0


def test_search_finds_fractions_and_knows_when_there_is_nothing():
    everything = Settings(use_all_numbers=True)
    found = solve((1, 5, 5, 5), 24, everything)  # (5 - 1 / 5) * 5
    assert found is not None and check_equation(found, [1, 5, 5, 5], 24, True).correct
    assert solve((2, 2), 5, everything) is None


def test_rows_without_solution_are_found_before_training(tmp_path: Path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"nums": [2, 2], "target": 5}]))
    config = build({**NO_EVALUATION, "datasets": {"countdown": {"config": {"path": str(path)}}}})
    with pytest.raises(UserError, match="countdown/train/000000"):
        check_gold(build_tasks(config, "train"))


def test_the_prompt_is_a_setting():
    task = make({"prompt": "{target} from {numbers} with {operators}, {{exactly}}", "operators": ["+", "-"]})
    problem = task.problem(0)
    numbers, target = problem.answer["numbers"], problem.answer["target"]
    assert problem.question == f"{target} from {list(numbers)} with +, -, {{exactly}}"
    assert make({"prompt": None}).problem(0).question == make().problem(0).question


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"min_number": 3}, "'min_number'.*'min_numbers'"),
        ({"min_numbers": 1}, "min_numbers 1"),
        ({"min_target": 50, "max_target": 20}, "min_target 50.*max_target 20"),
        ({"operators": ["%"]}, r"operators.*%"),
        ({"base_reward": 1.5}, "base_reward 1.5"),
        ({"prompt": "Make {target}."}, "has no {numbers}"),
        ({"prompt": "{numbers} {goal}"}, "placeholder {goal}"),
    ],
)
def test_wrong_settings_are_named(settings: dict, complaint: str):
    with pytest.raises(UserError, match=complaint):
        make(settings)


def test_a_target_that_cannot_be_made_is_named():
    with pytest.raises(UserError, match="500 to 600"):
        make({"max_value": 2, "min_target": 500, "max_target": 600}).problem(0)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [({"nums": "a b", "target": 3}, "whole number"), ({"nums": [], "target": 3}, "no filled column nums")],
)
def test_wrong_rows_are_named(tmp_path: Path, row: dict, complaint: str):
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    with pytest.raises(UserError, match=complaint):
        len(make({"path": str(tmp_path / "rows.json")}))


def test_the_recipe_takes_rows_in_place_of_its_own_problems(tmp_path: Path):
    rows = [{"nums": [1, 2, n], "target": n + 3} for n in range(20)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    config = load("countdown", [f"data_path={tmp_path / 'rows.json'}"]).config
    fixed = eval_problems(config)
    assert len(fixed) + len(build_tasks(config, "train", fixed)) == 20
