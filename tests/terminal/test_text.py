"""Text for people: plurals, control characters, wrapped lines."""

import pytest

from whetstone.config import load, make_plan
from whetstone.terminal.text import counted, escape_controls, size, times, wrap


@pytest.mark.parametrize(
    ("number", "words", "text"),
    [
        (1, ("step",), "1 step"),
        (0, ("step",), "0 steps"),
        (1200, ("batch", "batches"), "1,200 batches"),
        (1, ("batch", "batches"), "1 batch"),
    ],
)
def test_counts(number: int, words: tuple[str, ...], text: str) -> None:
    assert counted(number, *words) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("right\rwrong", "right\\rwrong"),
        ("a\u202eb\u2066c", "a\\u202eb\\u2066c"),
        ("\x9b31m \x00 \x7f \u2028", "\\x9b31m \\x00 \\x7f \\u2028"),
        ("\ud83d", "\\ud83d"),
        ("a\n\tb é 漢 😀", "a\n\tb é 漢 😀"),
    ],
)
def test_control_characters_are_written_out(text: str, shown: str) -> None:
    assert escape_controls(text) == shown
    assert escape_controls(text).encode()  # and can be encoded


def test_sizes() -> None:
    numbers = {0: "0 B", 999: "999 B", 1_500: "1.5 kB", 5_360_120: "5.4 MB", 2 * 10**9: "2.0 GB"}
    assert {number: size(number) for number in numbers} == numbers


def test_wrapped_lines_are_indented_and_break_no_word() -> None:
    path = "/" + "x" * 100
    lines = wrap(f"  whet eval checkpoint_path={path} is what you may try as soon as you wish to", 80).split(
        "\n"
    )
    assert lines[0] == "  whet eval"
    assert lines[1] == f"    checkpoint_path={path}"
    assert lines[2].startswith("    is what") and max(map(len, lines[2:])) <= 80
    assert wrap("a " * 45, 80, indent=20).split("\n")[1] == " " * 20 + "a a a a a"
    assert wrap("short\n\nlines", 80) == "short\n\nlines"


def test_a_plan_of_one_has_no_plurals() -> None:
    words = ["max_steps=1", "prompts_per_step=1", "eval_num_samples=1", "num_generations=2"]
    config = load("quickstart", words).config
    text = "\n".join(make_plan(config, num_problems=1).lines(config))
    assert "1 batch of 1 prompt x 2 completions" in text
    assert "1 optimizer step, 1 a batch (1 part x 1 iteration)" in text
    assert "1 training problem, seen once" in text
    many = make_plan(load("quickstart", [*words, "max_steps=640"]).config, num_problems=1)
    assert "1 training problem, seen 640 times" in "\n".join(many.lines(config))
    assert (times(1.26), times(9.6), times(12345.6)) == ("1.3 times", "9.6 times", "12,346 times")


def test_a_plan_says_that_nothing_is_evaluated() -> None:
    config = load("quickstart", ["eval_num_samples=0", "max_steps=4", "prompts_per_step=5"]).config
    plan = make_plan(config, num_problems=10)
    assert any(line.endswith("seen 2 times; no evaluation") for line in plan.lines(config))
    assert [plan.epoch(step) for step in (0, 1, 4)] == [0.0, 0.5, 2.0]
