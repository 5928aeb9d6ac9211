"""Functions of the user's own: how they are found, what they are given, what they may return."""

from pathlib import Path

import pytest

from whetstone.config.plugins import check_object
from whetstone.errors import UserError
from whetstone.rewards import custom

FILE = Path(__file__).parents[1] / "data" / "own_rewards.py"
ARGUMENTS = {
    "prompts": ["2+2?", "3+3?"],
    "completions": ["<answer>4</answer>", "<answer>5</answer>!"],
    "completion_ids": [[1, 2, 3], [4, 5]],
    "answer": ["4", "6"],
    "task": ["sums", "sums"],
}


def test_plain_function():
    values, _ = custom.call(custom.load(f"{FILE}:length_of_text"), ARGUMENTS, 2)
    assert values == [18.0, 19.0]


def test_async_function_gets_columns_and_ids():
    values, _ = custom.call(custom.load(f"{FILE}:slow_but_async"), ARGUMENTS, 2)
    assert values == [0.5, -0.02]  # right; wrong, with two tokens


def test_conversational_completions_are_lists_of_messages():
    completions = [custom.conversational(text) for text in ARGUMENTS["completions"]]
    assert completions[0] == [{"role": "assistant", "content": "<answer>4</answer>"}]
    values, _ = custom.call(
        custom.load(f"{FILE}:length_of_text"), {**ARGUMENTS, "completions": completions}, 2
    )
    assert values == [18.0, 19.0]


def test_logging_callables_reach_a_function_that_names_them():
    values, logged = custom.call(custom.load(f"{FILE}:logs"), ARGUMENTS, 2)
    assert values == [0.0, 0.0]
    assert logged.metrics == {"texts": [2.0]}
    assert logged.columns == {"first_letter": ["<", "<"]}


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("too_few", "1 .*2 "),
        ("no_numbers", r"\bstr\b"),
    ],
)
def test_wrong_return_values_are_refused(name: str, complaint: str):
    with pytest.raises(ValueError, match=complaint):
        custom.call(custom.load(f"{FILE}:{name}"), ARGUMENTS, 2)


def test_values_that_are_no_rewards_carry_their_reason():
    values, _ = custom.call(custom.load(f"{FILE}:not_finite"), ARGUMENTS, 2)
    assert values == ["returned nan, not a finite number"] * 2


def test_module_form_and_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_rewards.py").write_text(
        "def one(completions, **kwargs):\n    return [1.0] * len(completions)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    for spec in ("my_rewards.py:one", "my_rewards:one"):
        assert custom.call(custom.load(spec), ARGUMENTS, 2)[0] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("absent.py:f", r"absent\.py"),
        (f"{FILE}:lenght_of_text", "'lenght_of_text'.*contents, length_of_text"),
        (f"{FILE}:not_a_function", r"\bint\b"),
        ("no_such_package.rewards:f", "ModuleNotFoundError"),
        ("rewards.py:", "my_file.py:my_name"),
    ],
)
def test_what_cannot_be_found_is_named(spec: str, complaint: str):
    with pytest.raises(UserError, match=complaint):
        custom.load(spec)


def test_a_file_that_is_no_python_is_named(tmp_path: Path):
    (tmp_path / "bad.py").write_text("def f(:\n")
    with pytest.raises(UserError, match=r"bad\.py.*line 1"):
        check_object(f"{tmp_path}/bad.py:f", "reward_funcs")
