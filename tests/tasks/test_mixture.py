"""Mixtures: even turns by weight, whole epochs, and evaluation problems that training never sees."""

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from whetstone.config import build
from whetstone.errors import UserError
from whetstone.tasks.mixture import Mixture, apportion, build_tasks, check_gold, eval_problems, interleave
from whetstone.tasks.registry import list_tasks

TINY = {
    "chain_sum": {"config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
}  # 200 questions


def test_apportion_by_largest_remainders():
    assert apportion(10, [Fraction(1), Fraction(1), Fraction(1)]) == [4, 3, 3]
    assert apportion(7, [Fraction(2), Fraction(1)]) == [5, 2]  # 4.67 and 2.33
    assert apportion(1, [Fraction(1), Fraction(3)]) == [0, 1]


def test_turns_are_even():
    turns = interleave([6, 2])
    assert turns[:, 0].tolist() == [
        0,
        0,
        1,
        0,
        0,
        0,
        1,
        0,
    ]  # times 1/12 3/12 | 1/4=3/12 comes after its equal
    assert turns[turns[:, 0] == 0, 1].tolist() == [0, 1, 2, 3, 4, 5]
    counts = [700, 200, 100]
    share = np.cumsum(np.eye(3)[interleave(counts)[:, 0]], axis=0)
    exact = np.arange(1, 1001)[:, None] * np.array(counts) / 1000
    assert np.abs(share - exact).max() <= 1.0  # no prefix is off by more than one problem


def test_weights_decide_the_share_of_every_stretch():
    config = build(
        {
            "datasets": {"chain_sum": {"weight": 3}, "countdown": {"weight": 1}, "gcd": {"weight": 0}},
            "dataset_size": 400,
            "eval_num_samples": 0,
        }
    )
    mixture = build_tasks(config, "train")
    assert len(mixture) == 400 and set(mixture.tasks) == {"chain_sum", "countdown"}
    tasks = [mixture.problem(i).task for i in range(40)]
    for start in range(0, 40, 8):
        assert Counter(tasks[start : start + 8]) == {"chain_sum": 6, "countdown": 2}


def test_problems_are_pure_and_come_round_again_in_another_order():
    config = build({"datasets": {"countdown": {}}, "dataset_size": 50, "eval_num_samples": 0})
    first, again = build_tasks(config, "train"), build_tasks(config, "train")
    backward = [again.problem(i) for i in reversed(range(150))]
    forward = [first.problem(i) for i in range(150)]
    assert [p.id for p in forward] == [p.id for p in reversed(backward)]
    epochs = [[p.id for p in forward[start : start + 50]] for start in (0, 50, 100)]
    assert len(set(epochs[0])) == 50
    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]


def rows(path: Path, count: int, label: str) -> str:
    path.write_text(json.dumps([{"question": f"{label}{n}", "answer": str(n)} for n in range(count)]))
    return str(path)


def test_an_epoch_holds_every_row_once_and_weights_are_kept(tmp_path: Path):
    config = build(
        {
            "datasets": {
                "math": {"weight": 2, "config": {"path": rows(tmp_path / "a.json", 30, "a")}},
                "countdown": {"weight": 1},
            },
            "eval_num_samples": 0,
        }
    )
    mixture = build_tasks(config, "train")
    assert len(mixture) == 45  # 30 rows at two thirds
    for epoch in range(2):
        problems = [mixture.problem(epoch * 45 + i) for i in range(45)]
        assert Counter(p.question for p in problems if p.task == "math") == {f"a{n}": 1 for n in range(30)}
        assert Counter(p.task for p in problems) == {"math": 30, "countdown": 15}


def test_rows_that_are_evaluation_problems_are_counted(tmp_path: Path, caplog):
    files = {"path": rows(tmp_path / "a.json", 30, "a"), "eval_path": rows(tmp_path / "b.json", 4, "A")}
    config = build({"datasets": {"math": {"config": files}}})
    with caplog.at_level("INFO", "whetstone"):
        assert len(build_tasks(config, "train")) == 26
    assert "math: 4 of 30 rows are evaluation problems" in caplog.text


def test_no_evaluation_problem_in_training_of_a_tiny_space():
    config = build({"datasets": TINY, "dataset_size": 1000, "eval_num_samples": 60})
    fixed = eval_problems(config)
    questions = {p.question for p in fixed}
    assert len(fixed) == len(questions) == 60
    assert all(p.id.startswith("chain_sum/eval/") for p in fixed)
    unguarded = Mixture(config, "train")
    assert any(
        unguarded.problem(i).question in questions for i in range(300)
    )  # the guard has something to do
    mixture = build_tasks(config, "train")
    met = {mixture.problem(i).question for i in range(1000)}
    assert not met & questions
    assert len(met) > 100
    again = build_tasks(config, "train", fixed)
    assert [again.problem(i) for i in range(50)] == [mixture.problem(i) for i in range(50)]


def test_a_space_that_the_evaluation_fills_is_refused():
    tiny = {"coin_flip": {"config": {"min_trials": 3, "max_trials": 3}}}
    config = build({"datasets": tiny, "eval_num_samples": 200})
    mixture = build_tasks(config, "train")
    with pytest.raises(UserError, match="coin_flip"):
        for i in range(100):
            mixture.problem(i)


def test_evaluation_problems_are_fixed_and_spread_by_weight():
    config = build(
        {
            "datasets": {"chain_sum": {}},
            "eval_datasets": {"chain_sum": {"weight": 2}, "gcd": {"weight": 1}},
            "eval_num_samples": 30,
        }
    )
    first, second = eval_problems(config), eval_problems(config)
    assert first == second
    assert Counter(p.task for p in first) == {"chain_sum": 20, "gcd": 10}
    assert Counter(p.task for p in first[:15]) == {"chain_sum": 10, "gcd": 5}
    other = build({"datasets": {"chain_sum": {}}, "eval_num_samples": 20, "eval_dataset_seed": 3})
    assert not {p.question for p in eval_problems(other)} & {p.question for p in first}


def test_no_evaluation_no_problems():
    assert eval_problems(build({"datasets": {"chain_sum": {}}, "eval_num_samples": 0})) == []


def test_gold_answers_are_checked(tmp_path: Path):
    check_gold(
        build_tasks(build({"datasets": {"chain_sum": {}, "countdown": {}}, "eval_num_samples": 0}), "train")
    )


@pytest.mark.parametrize(
    ("datasets", "complaint"),
    [
        ({}, "datasets"),
        ({"chain_sum": {"weight": 0}}, "weight 0"),
        ({"countdwn": {}}, "'countdwn'.*'countdown'.*whet tasks"),
        ({"xyzzy": {}}, "'xyzzy'.*`whet tasks`"),
    ],
)
def test_wrong_mixtures_are_named(datasets: dict, complaint: str):
    with pytest.raises(UserError, match=complaint):
        build_tasks(build({"datasets": datasets, "eval_num_samples": 0}), "train")


def test_every_task_is_listed_with_a_line():
    tasks = {task.name: task for task in list_tasks()}
    assert len(tasks) == 114  # reasoning-gym's 105, ours nine
    assert {tasks[name].category for name in ("math", "countdown", "code")} == {"whetstone"}
    assert (
        tasks["chain_sum"].category == "arithmetic" and tasks["reasoning_gym/countdown"].category == "games"
    )
    assert all(10 <= len(task.description) <= 140 and "\n" not in task.description for task in tasks.values())
