# ruff: noqa: E501, RUF005
r"""Extraction of answers and equality of mathematical answers, on worked-out cases."""

import time
from fractions import Fraction

import pytest

from whetstone.rewards.answers import (
    _math_verify,
    as_number,
    extract_boxed,
    extract_math,
    extract_tag,
    final_answer,
    math_equal,
    normalize,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>5</answer>", "5"),
        ("<answer>1</answer> no, <answer>\n 2 \n</answer> done", "2"),
        ("<answer>1</answer> and then <answer>2", "1"),  # an open tag is no answer
        ("<answer>5", None),
        ("5</answer>", None),
        ("<answer>1</answer></answer>", "1"),
        ("<answer>a <answer>b</answer>", "b"),
        ("", None),
        ("<answer></answer>", ""),
    ],
)
def test_last_closed_tag_is_taken(text: str, expected: str | None):
    assert extract_tag(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} then \boxed{\frac{a}{b^{2}}}", r"\frac{a}{b^{2}}"),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"\boxed {7}", "7"),
        (r"so \boxed 42.", "42"),
        (r"\boxed 1,234$", "1,234"),
        (r"\boxed{7}, with \boxed notation", "7"),
        (r"\fbox{7}", "7"),
        (r"\boxed{", None),
        (r"}} \boxed{3} {{", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a \boxed{b}}", "b"),
    ],
)
def test_last_closed_box_is_taken_with_its_nested_braces(text: str, expected: str | None):
    assert extract_boxed(text) == expected


def test_many_open_boxes_cost_one_pass():
    began = time.process_time()
    assert extract_boxed(r"\boxed{" * 20_000) is None
    assert time.process_time() - began < 5  # 20,000 scans of 140,000 characters would take minutes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"<answer>\boxed{5}</answer>", "5"),
        (r"\boxed{4} <answer>5</answer>", "5"),
        (r"<answer>5</answer> hence \boxed{4}", "4"),
        ("the answer is 5", None),
    ],
)
def test_the_later_of_box_and_tag_is_the_mathematical_answer(text: str, expected: str | None):
    assert extract_math(text) == expected


@pytest.mark.parametrize(
    ("solution", "expected"),
    [
        ("Natalia sold 48/2 = 24 clips. #### 1,072", "1,072"),
        (r"We get $x = \boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (" 42 ", "42"),
    ],
)
def test_truth_is_taken_out_of_full_solutions(solution: str, expected: str):
    assert final_answer(solution) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$ 1,234.50 $", "1234.50"),
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        (r"\text{Tuesday}", "tuesday"),
        (r"5\text{ cm}^2", "5"),
        ("12 dollars", "12"),
        ("x = 5.", "5"),
        (r"50\%", "50"),
        (r"90^\circ", "90"),
        ("1 1/2", "1+1/2"),
        ("(1,234)", "(1,234)"),
        ("(1,2)", "(1,2)"),
        ("5x", "5x"),
    ],
)
def test_normalization(text: str, expected: str):
    assert normalize(text) == expected


def test_exact_numbers():
    assert as_number("-.5") == Fraction(-1, 2)
    assert as_number(r"-\frac{3}{4}") == Fraction(-3, 4)
    assert as_number("1+1/2") == Fraction(3, 2)
    assert as_number("1.5e3") == 1500
    assert as_number("3/0") is None
    assert as_number("x") is None


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("1,234", "1234", True),
        (r"\frac12", "0.5", True),
        ("12.00", "12", True),
        ("1 1/2", "1.5", True),
        ("5", "6", False),
        ("50%", "50", True),
        ("50%", "0.5", True),
        ("0.333", "1/3", False),
        ("2x+1", "1+2x", True),  # from here on only math-verify can tell
        (r"\frac{\sqrt{3}}{2}", r"\sqrt{3}/2", True),
        ("10^2", "100", True),
        (r"\{2,1\}", r"\{1,2\}", True),
        ("x^2", "x^3", False),
        ("5x", "5", False),
        ("", "5", False),
        ("[[[", "4", False),
        (r"\frac{", "4", False),
        (r"\sqrt[", "4", False),
        ("\x00\ud800", "4", False),
        ("(" * 300, "4", False),
        ("9" * 10_000, "4", False),
    ],
)
def test_equality_by_normalization_numbers_and_math_verify(answer: str, truth: str, expected: bool):
    assert math_equal(answer, truth) is expected


@pytest.mark.parametrize(
    "answer",
    [
        *(r"\neq 42", r"\ne 42", r"\not= 42", "≠ 42", r"x \neq 42", "!= 42"),
        *(r"\emptyset \cup 42", r"42 \cup \emptyset", r"\varnothing \cup 42", "∅ \u222a 42"),
        *(r"\ldots 42", r"42 \ldots", r"\cdots 42", r"42\dots", "42...", "42..", "42…", "... 42"),
        *("42&43", "42 & 42", r"42 \\ 43", r"42\\43"),
        *(r"4200\%", "4200 %", r"0.42\%"),
        *(r"\sim 42", r"\leq 42", r"\ge 42", "> 42", "<42", r"\pm 42"),
        *("42?", "42#", "42_5", "42!", "43=42", "42=43", "42 or 43", r"42 \text{ or } 43", "not 42"),
        *(
            r"42 \text{ or anything}",
            "42 and 42.5",
            "42, 43",
            "4 2",
            "42;43",
            "42:43",
            "42|43",
            "42i",
            "--43",
        ),
    ],
)
def test_what_only_resembles_the_truth_is_wrong(answer: str):
    assert math_equal("42", "42") is True
    assert math_equal(answer, "42") is False


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("12", "1 2", False),
        ("1 2", "12", False),
        ("1 2", "1 2", True),
        ("1 234", "1234", True),
        (r"1\,234\,567", "1234567", True),
        ("0.5%", "0.5", False),
        (r"\frac{3}{4}\%", r"\frac{3}{4}", False),
        (r"\frac{1,000}{3}", r"\frac{1000}{3}", True),
        ("x=5", "y=5", False),
        ("x=5", "x=5.0", True),
        ("5", "x=5", True),
        ("x=5", "5", True),
        ("50%", "1/2", True),
        ("50", "50%", True),
        (r"x \neq 42", r"x \neq 42", True),
        (r"\emptyset", r"\emptyset", True),
        ("42_5", "42_5", True),
        (r"\log_2 8", "3", True),
        ("6*7=42", "42", True),
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", True),
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", False),
        ("2 or -2", r"\pm 2", True),
        (r"1\text{ and }-2", "-2, 1", True),
    ],
)
def test_signs_and_spaces_that_change_the_meaning(answer: str, truth: str, expected: bool):
    assert math_equal(answer, truth) is expected


@pytest.mark.parametrize(
    ("text", "solution", "expected"),
    [
        (r"\boxed{1} and \boxed{-2}", r"\boxed{1} and \boxed{-2}", True),
        (r"\boxed{-2} and \boxed{1}", r"$\boxed{1}$ and $\boxed{-2}$", True),
        (r"\boxed{-2, 1}", r"$\boxed{1}$ and $\boxed{-2}$", True),
        (r"\boxed{\{1, -2\}}", r"$\boxed{1}$ and $\boxed{-2}$", True),
        (r"$\boxed{1}$, $\boxed{-2}$", r"\boxed{1, -2}", True),
        (r"$\boxed{1}$ or $\boxed{-2}$.", "1, -2", True),
        (r"$\boxed{1}$, $\boxed{2}$, and $\boxed{3}$", r"\boxed{3, 2, 1}", True),
        (r"\(\boxed{1}\) and \(\boxed{-2}\)", r"\boxed{1} and \boxed{-2}", True),
        (r"\[\boxed{1}\] or \[\boxed{-2}\]", r"\boxed{1} and \boxed{-2}", True),
        (r"$\boxed{1} \text{ and } \boxed{-2}$", r"\boxed{1} and \boxed{-2}", True),
        (r"$\boxed{x=1}$ and $\boxed{x=-2}$", r"\boxed{1} and \boxed{-2}", True),
        (r"\boxed{\frac{1}{2}} and \boxed{0.25}", r"\boxed{\frac14} and \boxed{\frac12}", True),
        (r"\boxed{-2}", r"\boxed{1} and \boxed{-2}", False),  # half of the truth
        (r"\boxed{1} and \boxed{-2}", r"\boxed{-2}", False),  # one more than the truth
        (r"\boxed{1} or \boxed{3}", r"\boxed{1} and \boxed{-2}", False),
        (r"\boxed{7} then \boxed{-2}", r"\boxed{-2}", True),  # a step, then the answer
        (r"<answer>\boxed{1} and \boxed{-2}</answer>", r"\boxed{-2}, \boxed{1}", True),
    ],
)
def test_several_boxes_are_one_answer(text: str, solution: str, expected: bool):
    answer = extract_math(text)
    assert answer is not None
    assert math_equal(answer, final_answer(solution)) is expected


TRUTHS = ("42", "0.5", r"\frac{3}{4}")
# "=": as math-verify says; "+": right here, and math-verify denies it for some; "-": wrong here, and it takes some.
FORMS = {
    "= right": [r"\(#\)", r"\left(#\right)", r"x=#", r"#\text{ cm}", r"# \text{ cm}^2", "# cm", "# apples", r"#\,\text{km}", r"\$#"]
    + [r"#^\circ", r"\displaystyle #", r"\sqrt{(#)^2}", r"\frac{#}{1}", "(#)^1", r"#\text{ people}", "# students"]
    + ["The answer is #", "So the answer is $#$", r"\text{The answer is } #", "Final answer: #", "+#"],
    "+ right": ["#.", r"42\%", "42%", "42 percent", "# eggs", "# people", "# km/h", "# USD", "€#", "# dollars per day"]
    + [r"\approx #", r"\text{#}".replace("#", "42")],
    "= wrong": ["# 9", "#\n9", r"#\vert 9", r"#\bullet 9", r"#\mathstrut 9", "# thousand", "#, 9", "# or 9", "#;9"]
    + [r"\{#, 9\}", "#+1", "#x", "not #", "(#, 9)", "[#, 9]", r"# \pm 1", "# i", "# squared", "# and 9", "9#", "#^9"],
    "- wrong": ["#~9", r"#\hspace{1cm}9", "#\x009", "#\u200b9", r"#\text{ if } x>0, 9 \text{ otherwise}", r"#\text{ (wrong)}"]
    + [r"#\text{ million}", r"# \text{ hours } 30 \text{ min}", r"\neg #", "#^T", "#+0", "1*#", r"# \cdot 1", r"\neq #"]
    + ["The answer is not #", "The answer is 9 #", "# thirds", "# hundredths", "# root two", "# dozen", "41+2/2", "40+4/2"]
    + ["9=#", "> #", r"\le #", "#...", "#_5", "#?"],
}  # fmt: skip


@pytest.mark.parametrize("kind", FORMS)
def test_numbers_in_other_words_against_math_verify(kind: str):
    judges, expected = kind[0], kind.endswith("right")
    for form in FORMS[kind]:
        pairs = [(form.replace("#", truth), truth) for truth in (TRUTHS if "#" in form else ("42",))]
        assert [math_equal(*pair) for pair in pairs] == [expected] * len(pairs), form
        theirs = [_math_verify(*pair) for pair in pairs]
        if judges == "=":
            assert theirs == [expected] * len(pairs), form
