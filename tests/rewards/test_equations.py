"""The parser of arithmetic and the rules of countdown, on cases worked out by hand."""

import random
from fractions import Fraction

import pytest

from whetstone.rewards.equations import InvalidExpression, check_equation, evaluate


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("10 - 4 - 3", 3),
        ("24 / 4 / 2", 3),
        ("1 / 3 + 1 / 6", Fraction(1, 2)),
        ("-(2 - 5)", 3),
        ("--2", 2),
        ("2 * -3", -6),
        ("1.5 * 4", 6),
        ("0.1 + 0.2", Fraction(3, 10)),
        ("2 \N{MULTIPLICATION SIGN} 6 \N{DIVISION SIGN} 4", 3),
        (r"3 \times 4 \div 2 - 1", 5),
        ("8\N{MINUS SIGN}3", 5),
    ],
)
def test_values_are_exact(text: str, value: Fraction | int):
    assert evaluate(text).value == value


def test_agrees_with_python_on_random_expressions():
    generator = random.Random(0)
    for _ in range(300):
        text = str(generator.randint(1, 9))
        for _ in range(generator.randint(1, 6)):
            piece = f"{generator.choice('+-*')} {generator.randint(1, 99)}"
            text = f"({text}) {piece}" if generator.random() < 0.5 else f"{text} {piece}"
        assert evaluate(text).value == eval(text)  # only the test may: it wrote the text itself


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1 +",
        "(1 + 2",
        "1 2",
        "1 + a",
        "2 ** 3",
        "(1)(2)",
        "1..2",
        ".",
        "__import__('os')",
        "1,000",
        "+",
        "()",
        "(" * 41 + "1" + ")" * 41,
        "-" * 41 + "1",
        "1+" * 250 + "1",
    ],
)
def test_what_is_no_arithmetic_is_malformed(text: str):
    with pytest.raises(InvalidExpression):
        evaluate(text)
    assert not check_equation(text, [1, 2], 3).well_formed


def test_division_by_zero_is_wrong_but_well_formed():
    verdict = check_equation("5 / (3 - 3)", [5, 3, 3], 0)
    assert verdict.well_formed and not verdict.correct


@pytest.mark.parametrize(
    ("text", "exactly_once", "correct"),
    [
        ("42 + 19 + 4 - 1 = 64", True, True),  # 64, with all of 1, 4, 42, 19
        ("42 + 19 + 4 * 1 = 64", True, False),  # 65
        ("64", False, False),
        ("42 + 19 + 4 - 1 + 4 - 4", False, False),  # 4 is used twice
        ("(19 - 1 - 4) * 4 + 42", False, False),  # 4 is used twice
        ("42 + 19 + 4", False, False),  # 65
    ],
)
def test_given_numbers_are_used_at_most_or_exactly_once(text: str, exactly_once: bool, correct: bool):
    verdict = check_equation(text, [1, 4, 42, 19], 64, exactly_once)
    assert (verdict.correct, verdict.well_formed) == (correct, True)


def test_the_switch_decides_whether_numbers_may_be_left_over():
    assert check_equation("60 + 4", [60, 4, 7], 64).correct
    assert not check_equation("60 + 4", [60, 4, 7], 64, exactly_once=True).correct


def test_a_number_given_twice_may_be_used_twice():
    assert check_equation("5 + 5", [5, 5], 10, exactly_once=True).correct
    assert not check_equation("5 + 5", [5], 10).correct


def test_operators_can_be_restricted():
    assert not check_equation("6 * 2", [6, 2], 12, operators="+-").correct
    assert check_equation("6 + 2", [6, 2], 8, operators="+-").correct
    assert not check_equation("5+-3", [5, 3], 2, operators="+").correct  # a sign is a subtraction, too
    assert check_equation("-3+5", [5, 3], 2, operators="+-").correct
