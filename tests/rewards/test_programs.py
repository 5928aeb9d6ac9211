# ruff: noqa: E501
"""Programs out of texts, tests out of rows, verdicts out of runs: by hand-written examples."""

import math
from typing import Any

import pytest

from whetstone.errors import UserError
from whetstone.rewards.assertions import UnsupportedTest, split_assertions
from whetstone.rewards.programs import (
    ProgramResult,
    extract_program,
    read_tests,
    run_tests,
    same_text,
    same_value,
)
from whetstone.sandbox.languages import LANGUAGES
from whetstone.sandbox.pool import LocalPool
from whetstone.sandbox.program import Limits

PYTHON, C, Q = LANGUAGES["python"], LANGUAGES["c"], LANGUAGES["q"]


@pytest.fixture(scope="module")
def pool():
    with LocalPool() as made:
        yield made


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("print(1)", "print(1)"),
        ("Sure:\n```python\nprint(1)\n```\nDone.", "print(1)\n"),
        ("```\nprint(1)\n```", "print(1)\n"),
        ("```python\nprint(1)\n```\nor\n```py\nprint(2)\n```", "print(2)\n"),
        ("```python\nprint(1)\n```\nwhich prints\n```text\n1\n```", "print(1)\n"),
        ("```text\n1\n```", "1\n"),
        ("```python\nprint(1)", "print(1)"),  # the model stopped without closing
        ("<answer>print(1)</answer>", "print(1)"),
        ("<answer>\n```python\nprint(1)\n```\n</answer>", "print(1)\n"),
        ("<answer>print(0)</answer> no: <answer>print(1)</answer>", "print(1)"),
        ("", None),
        ("```python\n```", None),
        ("  \n ", None),
    ],
)
def test_the_program_in_a_text(text: str, program: str | None) -> None:
    assert extract_program(text, PYTHON, use_reasoning_format=False) == program


def test_the_reasoning_format_wants_an_answer() -> None:
    text = "<reasoning>\n```python\nprint(0)\n```\n</reasoning>\n<answer>\nprint(1)\n</answer>"
    assert extract_program(text, PYTHON, use_reasoning_format=True) == "print(1)"
    assert extract_program("```python\nprint(1)\n```", PYTHON, use_reasoning_format=True) is None


@pytest.mark.parametrize(
    ("value", "wanted", "same"),
    [
        (1, 1, True),
        (1, 1.0, True),
        (0.1 + 0.2, 0.3, True),
        (1.001, 1.0, False),
        (10**20, 10**20 + 1, False),  # whole numbers are exact
        (True, True, True),
        (True, 1, False),
        (1, True, False),
        ([1, [2.0]], [1, [2]], True),
        ([1, 2], [2, 1], False),
        ("a", "a", True),
        ("1", 1, False),
        (None, None, True),
        (None, 0, False),
        ({"a": [1]}, {"a": [1]}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (math.nan, math.nan, True),
        (math.inf, math.inf, True),
        (10**400, 1e308, False),
    ],
)
def test_same_value(value: Any, wanted: Any, same: bool) -> None:
    assert same_value(value, wanted) is same


def test_languages_without_truth_values_say_1() -> None:
    assert same_value(1, True, has_booleans=False)
    assert same_value([0, 1], [False, True], has_booleans=False)
    assert not same_value(0, True, has_booleans=False)


def test_same_text_forgives_spaces_at_the_ends_only() -> None:
    assert same_text("a \nb\n\n", "a\nb")
    assert not same_text(" a", "a")
    assert not same_text("a\n\nb", "a\nb")
    assert not same_text("", "a")


def test_the_worst_test_explains_a_verdict() -> None:
    assert ProgramResult(tests=("passed", "passed")).outcome == "passed"
    assert ProgramResult(tests=("passed", "wrong", "crash")).outcome == "crash"
    assert ProgramResult(tests=("wrong", "timeout", "crash")).outcome == "timeout"
    assert ProgramResult(tests=("compile_error",) * 2).outcome == "compile_error"


def test_all_kinds_of_tests_are_judged(pool: LocalPool) -> None:
    source = "import sys\ndef f(x): return [x, x * 2]\nif not sys.stdin.isatty():\n    for line in sys.stdin: print(int(line) * 2)\n"
    raw = [
        {"stdin": "1\n2\n", "stdout": "2\n4"},
        {"input": "5", "output": "11"},
        {"args": [3], "expected": [3, 6]},
        {"call": "f", "args": [3], "expected": [3, 7]},
        {"code": "print(f(1))", "stdout": "[1, 2]"},
        {"assert": "assert f(4) == [4, 8]\nassert f(4)[1] == 9"},
        "assert len(f(1)) == 2",
    ]
    tests = read_tests(raw, PYTHON, "f", "row 1")
    verdict = run_tests(pool, PYTHON, source, tests, Limits())
    assert verdict.tests == ("passed", "wrong", "passed", "wrong", "passed", "passed", "wrong", "passed")
    assert verdict.passed == 5


def test_a_cheat_on_calls_and_assertions_earns_nothing(pool: LocalPool) -> None:
    cheat = (
        "class Same:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
        "    def __lt__(self, other): return True\n    def __repr__(self): return '10'\n    def __bool__(self): return True\n"
        "class I(int):\n    __eq__ = lambda self, other: True\n    __repr__ = lambda self: '10'\n    __hash__ = int.__hash__\n"
        "def f(x): return Same() if x % 2 else I(3)\n"
        "import builtins\nbuiltins.AssertionError = ZeroDivisionError\nbuiltins.all = builtins.any = lambda x: True\n"
        "import json\njson.dumps = lambda x: '10'\n"
    )
    raw = [
        "assert f(3) == 10",
        "assert f(4) == 10",
        {"args": [3], "expected": 10},
        {"args": [4], "expected": 10},
    ]
    verdict = run_tests(pool, PYTHON, cheat, read_tests(raw, PYTHON, "f", "row"), Limits())
    assert verdict.passed == 0


def test_the_program_never_meets_what_an_assertion_expects(pool: LocalPool) -> None:
    spy = "import sys, inspect\ndef f(x):\n    f = sys._getframe()\n    seen = ''\n    while f:\n        seen += repr(f.f_locals) + repr(f.f_globals); f = f.f_back\n    return '321zyx'[::-1] if '321zyx'[::-1] in seen else ''\n"
    code = "wanted = 'xyz123'\nassert f(1) == wanted\nassert f(2) == 'xyz123'"
    assert run_tests(pool, PYTHON, spy, read_tests(code, PYTHON, "f", "row"), Limits()).tests == (
        "wrong",
        "wrong",
    )


def test_the_check_of_humaneval_is_understood() -> None:
    code = "def check(candidate):\n    assert candidate([1]) == 1\n    assert candidate([]) == 0\n\ncheck(total)\n"
    assert [assertion.expressions for assertion in split_assertions(code, "total")] == [
        ("total([1])",),
        ("total([])",),
    ]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("for i in range(3):\n    assert f(i) == i", r"\bfor\b"),
        ("assert (", "Python"),
        ("x = 1", "asserts nothing"),
        ("assert 1 == 1", "nothing about the program"),
        ("def check(candidate):\n    assert candidate(1)", "entry_point"),
    ],
)
def test_other_test_code_is_refused(code: str, reason: str) -> None:
    with pytest.raises(UnsupportedTest, match=reason):
        split_assertions(code)


@pytest.mark.parametrize(
    ("raw", "language", "complaint"),
    [
        ([], PYTHON, "Row 3.*tests"),
        ([{"stdin": "1"}], PYTHON, "Row 3, test 1"),
        ([{"args": [1]}], PYTHON, "no `expected`"),
        ([{"args": [1], "expected": 1}], C, r"test 1.*\bc\b"),
        (["assert f(1)"], Q, "is assertion code"),
        ([{"stout": "1"}], PYTHON, "'stout'"),
        ([3], PYTHON, "write an object"),
        ([{"code": "x", "stdout": "1"}], C, r"\bcode\b.*\bc\b"),
    ],
)
def test_tests_that_can_not_be_used_are_refused(raw: Any, language: Any, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        read_tests(raw, language, "f", "Row 3")


def test_a_call_without_a_name_is_refused() -> None:
    with pytest.raises(UserError, match="without a name"):
        read_tests([{"args": [1], "expected": 1}], PYTHON, None, "Row 3")
