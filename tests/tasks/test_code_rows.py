"""Rows of MBPP, HumanEval and LiveCodeBench under their own column names: prompts, tests, gold answers."""

import base64
import json
import logging
import pickle
import zlib
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from whetstone.config import TaskSpec, load
from whetstone.errors import UserError
from whetstone.tasks.code import CodeTask

MBPP = [
    {"task_id": k, "text": f"Write a function to add {k} to a number.",
     "code": f"def plus(x):\n  return x + {k}", "test_setup_code": "",
     "test_list": [f"assert plus(1) == {1 + k}", f"assert plus(-{k}) == 0"], "challenge_test_list": []}
    for k in (1, 2)
]  # fmt: skip
SANITIZED = [
    {"source_file": "a.json", "task_id": k, "prompt": f"Write a function that gives the {k}th root.",
     "code": f"def helper(x): return x\ndef root(x):\n    return helper(x) ** (1 / {k})",
     "test_imports": ["import math"], "test_list": [f"assert math.isclose(root({2**k}), 2.0)"]}
    for k in (2, 3)
]  # fmt: skip
HUMANEVAL = [
    {"task_id": f"HumanEval/{k}",
     "prompt": f'import math\n\ndef up(x):\n    """Round x up, then add {k}."""\n',
     "canonical_solution": f"    return math.ceil(x) + {k}\n", "entry_point": "up",
     "test": f"METADATA = {{}}\n\ndef check(candidate):\n    assert candidate(1.5) == {2 + k}\n"}
    for k in (1, 2)
]  # fmt: skip
LOOP = "def check(candidate):\n    for x in range(3):\n        assert candidate(x) == x\n"


def contest(**row: Any) -> dict[str, Any]:
    row = {"question_title": "Sum", "starter_code": "", "metadata": "{}", "private_test_cases": "", **row}
    return {**row, "public_test_cases": json.dumps(row["public_test_cases"])}


STDIN = contest(
    question_content="Print the sum of two numbers.",
    public_test_cases=[{"input": "2 3\n", "output": "5\n", "testtype": "stdin"}],
)
METHOD = contest(
    question_content="Add a list to a number.",
    starter_code="class Solution:\n    def add(self, xs: list[int], flag: bool) -> list[int]:\n        ",
    public_test_cases=[{"input": "[1, 2]\ntrue", "output": "[2, 3]", "testtype": "functional"}],
    private_test_cases=json.dumps([{"input": "[]\nfalse", "output": "[]", "testtype": "functional"}]),
)


def make(tmp_path: Path, rows: list[dict[str, Any]], **settings: Any) -> CodeTask:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load(None, ["max_tests_per_problem=0"]).config
    return CodeTask(config, "code", TaskSpec(config={"path": str(path), **settings}), "train", False)


def results(task: CodeTask, text: str, index: int = 0) -> tuple[str, ...]:
    score = task.score(task.problem(index), f"```python\n{text}\n```")
    return score.tests


@pytest.mark.parametrize(("rows", "name"), [(MBPP, "plus"), (SANITIZED, "root"), (HUMANEVAL, "up")])
def test_the_gold_answer_passes_all_tests(tmp_path: Path, rows: list[dict[str, Any]], name: str) -> None:
    task = make(tmp_path, rows)
    assert len(task) == 2
    for index, row in enumerate(rows):
        problem = task.problem(index)
        statement = str(row.get("text") or row["prompt"]).strip()
        assert problem.question.startswith(f"{statement}\nThe program must define {name}.")
        assert "Python" in problem.question
        gold = task.gold(problem)
        assert gold is not None and task.score(problem, gold).correct
    assert task.score(task.problem(0), task.gold(task.problem(1)) or "").correct is False


def test_a_solution_of_humaneval_goes_on_from_its_prompt(tmp_path: Path) -> None:
    task = make(tmp_path, HUMANEVAL)
    whole = HUMANEVAL[0]["prompt"] + HUMANEVAL[0]["canonical_solution"]
    assert task.gold(task.problem(0)) == f"```python\n{whole.rstrip()}\n```"
    complete = {**HUMANEVAL[0], "canonical_solution": "def up(x):\n    return 3"}
    task = make(tmp_path, [complete])
    assert task.gold(task.problem(0)) == "```python\ndef up(x):\n    return 3\n```"


def test_tests_of_mbpp_run_behind_their_setup(tmp_path: Path) -> None:
    row = {**MBPP[0], "test_setup_code": "start = 41", "test_list": ["assert plus(start) == 42"]}
    task = make(tmp_path, [row])
    assert results(task, "def plus(x): return x + 1") == ("passed",)
    assert results(task, "def plus(x): return x + 2") == ("wrong",)


def test_the_function_that_tests_call_is_asked_for(tmp_path: Path) -> None:
    # A helper's name may end the name of the function.
    code = "def swap(x): return x\ndef max_swap(x): return swap(x)"
    rows = [{"text": f"Do {k}.", "code": code, "test_list": [f"assert max_swap({k}) == {k}"]} for k in (1, 2)]
    assert "must define max_swap." in make(tmp_path, rows).problem(0).question


def test_contests_have_stdin_or_methods(tmp_path: Path) -> None:
    task = make(tmp_path, [STDIN, METHOD])
    assert results(task, "print(sum(map(int, input().split())))") == ("passed",)
    assert results(task, "print(6)") == ("wrong",)
    assert "Begin with:\nclass Solution:" in task.problem(1).question
    right = "class Solution:\n    def add(self, xs, flag):\n        return [x + flag for x in xs]"
    assert results(task, right, 1) == ("passed", "passed")  # the public test and the private one
    assert results(task, right.replace("x + flag", "x"), 1) == ("wrong", "passed")
    assert task.gold(task.problem(1)) is None


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


def test_pickled_tests_are_named_and_never_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packed = base64.b64encode(zlib.compress(pickle.dumps(Trap(tmp_path / "trap")))).decode()
    with caplog.at_level(logging.WARNING):
        task = make(tmp_path, [{**STDIN, "private_test_cases": packed}, METHOD])
        assert results(task, "print(5)") == ("passed",)
    assert "private_test_cases are pickled, which is never read" in caplog.text
    assert not (tmp_path / "trap").exists()
    caplog.clear()
    assert len(make(tmp_path, [STDIN, METHOD])) == 2 and "never read" not in caplog.text
    pickle.loads(zlib.decompress(base64.b64decode(packed)))
    assert (tmp_path / "trap").exists()  # it would have been


def test_rows_whose_tests_give_answers_away_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert len(make(tmp_path, [*HUMANEVAL, {**HUMANEVAL[0], "test": LOOP}])) == 2
    assert "1 of 3 rows are left out" in caplog.text and "row 3, test 1" in caplog.text
    with pytest.raises(UserError, match="row 1, test 1 can't be checked outside"):
        len(make(tmp_path, [{**HUMANEVAL[0], "test": LOOP}]))


def test_other_languages_keep_their_own_rows(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="names no language"):
        len(make(tmp_path, [{"text": "Add.", "tests": [{"stdin": "1", "stdout": "2"}]}]))
    with pytest.raises(UserError, match="which is for Python alone"):
        len(make(tmp_path, MBPP, language="bash"))
    assert make(tmp_path, [STDIN], language="bash").problem(0).answer["language"] == "bash"


@pytest.mark.parametrize("output", ["[2, 3", None])
def test_a_broken_test_of_a_contest_is_named(tmp_path: Path, output: Any) -> None:
    row = {
        **METHOD,
        "public_test_cases": json.dumps([{"input": "1", "output": output, "testtype": "functional"}]),
    }
    with pytest.raises(UserError, match="row 1, test 1 has the field 'testtype'"):
        len(make(tmp_path, [row]))


def test_parquet_lists_and_csv_texts_are_the_same(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(SANITIZED), tmp_path / "rows.parquet")
    text = pyarrow.Table.from_pylist(
        [
            {key: json.dumps(value) if isinstance(value, list) else value for key, value in row.items()}
            for row in SANITIZED
        ]
    )
    pyarrow.parquet.write_table(text, tmp_path / "text.parquet")
    config = load(None, ["max_tests_per_problem=0"]).config
    first, second = (
        CodeTask(config, "code", TaskSpec(config={"path": str(tmp_path / name)}), "train", False)
        for name in ("rows.parquet", "text.parquet")
    )
    assert first.problem(0) == second.problem(0) == make(tmp_path, SANITIZED).problem(0)


def test_the_notes_say_what_is_paid(tmp_path: Path) -> None:
    rows, payment = make(tmp_path, MBPP).notes()
    assert rows.startswith("code: 2 rows of ") and "2 to train on; statement from text, tests from" in rows
    assert payment == "code: accuracy pays 1 x the share of tests passed, and 1 more if all pass."
