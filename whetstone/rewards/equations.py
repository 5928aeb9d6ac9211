"""Arithmetic written by a model: parsed by hand, computed in exact fractions, compared with a target.

Knows + - * / (also the signs of print and LaTeX's \\times, \\div, \\cdot), parentheses, unary minus,
integers and decimals. Never `eval`, and nothing that a model wrote raises: other text, and text that is too
long or too deep, is reported as not well formed.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import add, mul, sub, truediv

LONGEST = 400  # characters
DEEPEST = 40  # nested parentheses and minus signs

_SPELLINGS = {
    "\N{MULTIPLICATION SIGN}": "*",
    "\N{MIDDLE DOT}": "*",
    "\N{ASTERISK OPERATOR}": "*",
    "\N{DIVISION SIGN}": "/",
    "\N{MINUS SIGN}": "-",
    "\N{EN DASH}": "-",
    "\\times": "*",
    "\\cdot": "*",
    "\\div": "/",
}
_OPERATIONS = {"+": add, "-": sub, "*": mul, "/": truediv}


class InvalidExpression(Exception):
    """The text is no arithmetic that we know."""


@dataclass(frozen=True, kw_only=True)
class Expression:
    value: Fraction | None  # None: a division by zero
    numbers: tuple[Fraction, ...]
    operators: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Equation:
    correct: bool
    well_formed: bool


def check_equation(
    text: str,
    numbers: Sequence[int],
    target: int | Fraction,
    exactly_once: bool = False,
    operators: str = "+-*/",
) -> Equation:
    """Whether the text left of `=` makes `target` from `numbers`, each used at most (or exactly) once."""
    try:
        result = evaluate(text.split("=", 1)[0])
    except InvalidExpression:
        return Equation(correct=False, well_formed=False)
    used, available = Counter(result.numbers), Counter(Fraction(number) for number in numbers)
    uses_numbers = used == available if exactly_once else used <= available
    is_allowed = uses_numbers and result.operators <= set(operators)
    return Equation(correct=is_allowed and result.value == target, well_formed=True)


def evaluate(text: str) -> Expression:
    """The exact value of an expression; raises `InvalidExpression`."""
    for spelling, plain in _SPELLINGS.items():
        text = text.replace(spelling, plain)
    if len(text) > LONGEST:
        raise InvalidExpression(f"is longer than {LONGEST} characters")
    return _Parser(text).whole()


class _Parser:
    """sum = product {(+|-) product}; product = factor {(*|/) factor}; factor = number | -factor | (sum)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.depth = 0
        self.numbers: list[Fraction] = []
        self.operators: set[str] = set()

    def whole(self) -> Expression:
        value = self.sum()
        if self.peek():
            raise InvalidExpression(f"has '{self.peek()}' where an operator or the end should be")
        return Expression(value=value, numbers=tuple(self.numbers), operators=frozenset(self.operators))

    def peek(self) -> str:
        while self.position < len(self.text) and self.text[self.position].isspace():
            self.position += 1
        return self.text[self.position : self.position + 1]

    def accept(self, choices: str) -> str:
        character = self.peek()
        if not character or character not in choices:
            return ""
        self.position += 1
        return character

    def sum(self) -> Fraction | None:
        return self.chain("+-", self.product)

    def product(self) -> Fraction | None:
        return self.chain("*/", self.factor)

    def chain(self, operators: str, operand: Callable[[], Fraction | None]) -> Fraction | None:
        value = operand()
        while operator := self.accept(operators):
            self.operators.add(operator)
            right = operand()
            if value is None or right is None or (operator == "/" and right == 0):
                value = None  # nothing is equal to a division by zero, but the rest must still be well formed
            else:
                value = _OPERATIONS[operator](value, right)
        return value

    def factor(self) -> Fraction | None:
        self.depth += 1
        if self.depth > DEEPEST:
            raise InvalidExpression(f"is nested deeper than {DEEPEST}")
        if self.accept("-"):
            self.operators.add("-")
            inner = self.factor()
            value = None if inner is None else -inner
        elif self.accept("("):
            value = self.sum()
            if not self.accept(")"):
                raise InvalidExpression("has a parenthesis that is not closed")
        else:
            value = self.number()
        self.depth -= 1
        return value

    def number(self) -> Fraction:
        self.peek()
        start = self.position
        while self.position < len(self.text) and self.text[self.position] in "0123456789.":
            self.position += 1
        digits = self.text[start : self.position]
        if not digits or digits.count(".") > 1 or digits == ".":
            raise InvalidExpression(f"has '{digits or self.peek()}' where a number should be")
        self.numbers.append(Fraction(digits + "0" if digits.endswith(".") else digits))
        return self.numbers[-1]
