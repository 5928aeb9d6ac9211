"""Mathematics from rows: every kind of file, what is paid, who gets which rows, and clear complaints."""

import csv
import importlib
import json
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from whetstone.config import TaskSpec, build
from whetstone.errors import UserError
from whetstone.tasks.mixture import build_tasks, check_gold, eval_problems
from whetstone.tasks.own_rows import MathTask
from whetstone.tasks.registry import make_task

ROWS = [{"question": f"What is {n} + {n}?", "ground_truth": str(2 * n), "level": n % 3} for n in range(40)]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return path


def make(settings: dict[str, Any], split: str = "train", **keys) -> MathTask:
    config = build({"datasets": {"math": {"config": settings}}, **keys})
    task = make_task(config, "math", config.tasks.datasets["math"], split)
    assert isinstance(task, MathTask)
    return task


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv", ".tsv", ".parquet"])
def test_every_kind_of_file_gives_the_same_problems(tmp_path: Path, suffix: str):
    task = make({"path": str(write(tmp_path / f"rows{suffix}", ROWS))}, eval_num_samples=0)
    assert len(task) == 40
    problem = task.problem(7)
    assert problem.question == "What is 7 + 7?"
    assert problem.id == "math/train/000007"
    assert task.score(problem, r"so it is \boxed{14}").parts == {"correct": 1.0, "accuracy": 1.0}


def test_a_run_accepts_the_answers_of_its_rows(tmp_path: Path):
    path = str(write(tmp_path / "rows.json", ROWS))
    config = build({"datasets": {"math": {"config": {"path": path}}}, "eval_num_samples": 0})
    check_gold(build_tasks(config, "train"))  # what every run does at its start
    task = make({"path": path}, eval_num_samples=0)
    assert (task.gold(task.problem(7)) or "").endswith(r"\boxed{14}</answer>")


def test_right_wrong_and_missing_answers_are_paid_as_configured(tmp_path: Path):
    path = str(write(tmp_path / "rows.json", ROWS))
    task = make({"path": path}, eval_num_samples=0)
    problem = task.problem(7)
    assert task.score(problem, "<answer>14.0</answer>").reward == 1.0
    assert task.score(problem, "<answer>15</answer>").reward == -1.0
    assert task.score(problem, "it is 14").reward == -0.5
    assert task.score(problem, r"\boxed{}").reward == -0.5
    assert task.score(problem, "it is 14").answer is None
    assert (
        task.failure_reward == -1.0
    )  # a scorer that is made to hang must not pay better than a wrong answer
    other = make(
        {"path": path}, eval_num_samples=0, reward_correct=2.0, reward_wrong=0.0, reward_no_answer=-2.0
    )
    assert [other.score(problem, t).reward for t in (r"\boxed{14}", r"\boxed{1}", "")] == [2.0, 0.0, -2.0]
    assert other.score(problem, r"\boxed{1}").parts["correct"] == 0.0


def test_columns_are_named_or_found_and_solutions_are_reduced(tmp_path: Path):
    rows = [{"problem": f"p{n}", "solution": rf"long \boxed{{\frac{{{n}}}{{7}}}} end"} for n in range(3)]
    task = make({"path": str(write(tmp_path / "math.json", rows))}, eval_num_samples=0)
    assert task.problem(1).answer["answer"] == r"\frac{1}{7}"
    rows = [{"prompt": [{"role": "user", "content": f"p{n}"}], "answer": n} for n in range(3)]
    task = make({"path": str(write(tmp_path / "chat.json", rows))}, eval_num_samples=0)
    assert (task.problem(1).question, task.problem(1).answer["answer"]) == ("p1", "1")
    rows = [{"q": f"p{n}", "a": f"text #### {n},000"} for n in range(3)]
    settings = {
        "path": str(write(tmp_path / "gsm.jsonl", rows)),
        "question_column": "q",
        "answer_column": "a",
    }
    task = make(settings, eval_num_samples=0)
    assert task.problem(2).answer["answer"] == "2,000"
    assert task.score(task.problem(2), r"\boxed{2000}").parts["correct"] == 1.0


def test_other_columns_reach_functions_of_the_users_own(tmp_path: Path):
    path = str(write(tmp_path / "rows.json", ROWS))
    task = make({"path": path}, eval_num_samples=0, reward_funcs=["accuracy", "mine.py:f"])
    # as TRL gives them: every column under its own name
    assert task.columns(task.problem(5)) == {**ROWS[5], "answer": "10"}


def test_max_samples_takes_the_first_rows(tmp_path: Path):
    path = str(write(tmp_path / "rows.json", ROWS))
    assert len(make({"path": path, "max_samples": 10}, eval_num_samples=0)) == 10


def test_one_file_is_split_by_the_question(tmp_path: Path):
    path = str(write(tmp_path / "rows.json", [*ROWS, *ROWS]))  # every question twice
    settings = {"path": path, "eval_fraction": 0.25}
    train, evaluation = make(settings), make(settings, "eval")
    ours = [train.problem(i).question for i in range(len(train))]
    theirs = [evaluation.problem(i).question for i in range(len(evaluation))]
    assert len(ours) + len(theirs) == 80
    assert not set(ours) & set(theirs)
    assert 4 <= len(theirs) <= 36 and len(theirs) % 2 == 0  # about a quarter of 80; both copies on one side
    tiny = {"path": path, "eval_fraction": 0.000001}
    assert len(make(tiny, "eval")) == 2  # at least one question


def test_separate_evaluation_files_are_used_whole(tmp_path: Path):
    train, test = write(tmp_path / "train.json", ROWS[:30]), write(tmp_path / "test.json", ROWS[25:])
    for keys in (
        {"datasets": {"math": {"config": {"path": str(train), "eval_path": str(test)}}}},
        {
            "datasets": {"math": {"config": {"path": str(train)}}},
            "eval_datasets": {"math": {"config": {"path": str(test)}}},
        },
    ):
        config = build({**keys, "eval_num_samples": 100})
        fixed = eval_problems(config)
        assert {p.question for p in fixed} == {row["question"] for row in ROWS[25:]}
        mixture = build_tasks(config, "train", fixed)
        # rows 25 to 29 are in both files: training does without them
        assert sorted(mixture.problem(i).question for i in range(len(mixture))) == sorted(
            row["question"] for row in ROWS[:25]
        )


@pytest.mark.parametrize(
    ("name", "content", "settings", "complaint"),
    [
        ("rows.json", None, {}, "rows.json, which is not there"),
        ("rows.xlsx", "x", {}, "whose kind is not known"),
        ("rows.json", "[", {}, "not readable as json"),
        ("rows.jsonl", '{"question": 1}\n{oops\n', {}, "line 2"),
        ("rows.json", "[]", {}, "has no rows"),
        ("rows.csv", "question,ground_truth\n", {}, "has no rows"),
        ("rows.parquet", "not parquet", {}, "not readable as parquet"),
        ("rows.json", '["a", "b"]', {}, "not rows with named columns"),
        ("rows.json", "3", {}, "not a list of rows"),
        (
            "rows.json",
            '[{"q": "a", "ground_truth": "b"}]',
            {},
            r"no filled column prompt or question.*\(q, ground_truth\)",
        ),
        (
            "rows.json",
            '[{"question": "a", "truth": "b"}]',
            {"answer_column": "anwser"},
            r"'anwser'.*answer_column.*\(question, truth\)",
        ),
        ("rows.json", '[{"question": "a", "answer": ""}]', {}, "no answers to compare"),
        ("rows.json", '[{"question": "a", "answer": "1"}]', {}, "too few different questions"),
        ("rows.json", "[]", {"max_sample": 3}, "'max_sample'.*'max_samples'"),
        ("rows.json", "[]", {"max_samples": 0}, "max_samples 0"),
        ("rows.json", "[]", {"eval_fraction": 2}, "eval_fraction 2"),
    ],
)
def test_complaints_name_the_thing(
    tmp_path: Path, name: str, content: str | None, settings: dict, complaint: str
):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=complaint):
        len(make({"path": str(tmp_path / name), **settings}))


def test_rows_are_needed():
    with pytest.raises(UserError, match="path"):
        make({})


def test_a_hub_data_set_that_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"nobody/nothing-here \(.*main.*train\)"):
        len(make({"dataset": "nobody/nothing-here", "name": "main"}))


def test_offline_hub_uses_the_cache_and_restores_clients(
    monkeypatch: pytest.MonkeyPatch,
):
    flags = ("datasets.config", "huggingface_hub.constants")
    for name in flags:
        monkeypatch.setattr(f"{name}.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://hub.invalid")  # never resolves
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    begun = time.monotonic()
    with pytest.raises(UserError, match="nobody/nothing-here"):
        len(make({"dataset": "nobody/nothing-here"}))
    assert time.monotonic() - begun < 15
    assert [importlib.import_module(name).HF_HUB_OFFLINE for name in flags] == [False, False]


def test_a_folder_of_the_hub_kind_is_loaded_by_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # No hub can be had in a test; `datasets` reads a local folder of parquet files by the same call.
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.parquet", ROWS)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    task = make({"dataset": str(tmp_path / "set")}, eval_num_samples=0)
    assert len(task) == 40 and task.problem(3).answer["answer"] == "6"


def test_a_label_tells_entries_of_the_same_kind_apart(tmp_path: Path):
    one, two = write(tmp_path / "one.json", ROWS[:8]), write(tmp_path / "two.json", ROWS[8:12])
    config = build(
        {
            "datasets": {
                "math/one": {"config": {"path": str(one)}},
                "math/two": {"config": {"path": str(two)}},
            },
            "eval_num_samples": 0,
        }
    )
    mixture = build_tasks(config, "train")
    assert mixture.tasks["math/two"].problem(0).id == "math/two/train/000000"
    assert len(mixture) == 16  # eight rows at half the weight


def test_spec_is_not_needed_twice():
    with pytest.raises(UserError, match=r"'pth'.*'path'"):
        make_task(build({}), "math", TaskSpec(weight=1.0, config={"pth": "x"}), "train")
