"""Countdown: make the target from the numbers with + - * /, each at most once (or exactly, by a setting).

Generated problems are solvable by construction: the target is the value of a random expression over all the
numbers. Rows have numbers and target, and optionally messages as their own prompt. The answer is the text
left of `=` in the last `<answer>`; a well-formed wrong one earns a small base reward.
"""

import logging
import random
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from whetstone.config import Config, TaskSpec
from whetstone.config.data_keys import ROW_SETTINGS
from whetstone.errors import UserError
from whetstone.rewards.answers import extract_tag
from whetstone.rewards.equations import check_equation
from whetstone.seeds import seed
from whetstone.tasks import rows
from whetstone.tasks.base import NO_THOUGHTS, check_setting_names
from whetstone.tasks.prompts import check_template
from whetstone.tasks.row_reader import cell, read_messages
from whetstone.types import Problem, TaskScore

QUESTION = (
    "Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic "
    "operations ({operators}) and each number {rule}. Show your work in <think> </think> tags. And return "
    "the final answer in <answer> </answer> tags, for example <answer> {example} </answer>."
)
_MAX_NUMBERS = 20  # in a row
_SEARCH_BUDGET = 300_000
_EXAMPLES = {"/": "(1 + 2) / 3", "*": "(1 + 2) * 3", "-": "1 + 2 - 3", "+": "1 + 2 + 3"}


@pydantic_dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Settings:
    """Generated problems; the names are reasoning-gym's."""

    min_numbers: int = Field(default=3, ge=2, le=8)
    max_numbers: int = Field(default=4, ge=2, le=8)
    min_value: int = Field(default=1, ge=1)
    max_value: int = Field(default=99, ge=1)
    min_target: int = Field(default=10, ge=1)
    max_target: int = Field(default=100, ge=1)
    operators: tuple[str, ...] = ("+", "-", "*", "/")
    use_all_numbers: bool = False
    base_reward: float = Field(default=0.1, ge=0, lt=1)
    prompt: str | None = None  # instead of QUESTION, with the same placeholders


_DEFAULTS = {name: getattr(Settings(), name) for name in Settings.__dataclass_fields__}
_GENERATED = tuple(key for key in _DEFAULTS if key not in ROW_SETTINGS["countdown"])  # mean nothing to rows
logger = logging.getLogger(__name__)


class CountdownTask(rows.RowTask):
    description = (
        "Makes a target from given numbers, generated or from rows (reasoning-gym's own is "
        "reasoning_gym/countdown)"
    )
    default_settings = _DEFAULTS | rows.row_settings("countdown") | _DEFAULTS  # in this order
    isolated = True

    def __init__(self, config: Config, name: str, spec: TaskSpec, split: str, shared: bool) -> None:
        super().__init__(config, name, spec, split, shared)
        self.generated = not (spec.config.get("path") or spec.config.get("dataset"))
        if not self.generated:
            rows.check_settings(spec.config, self.default_settings, name)
            unused = [key for key in spec.config if key in _GENERATED]
            if unused and split == "train":
                logger.info("%s reads rows, so %s has no effect.", name, ", ".join(unused))
        self._settings = _check(
            {key: value for key, value in spec.config.items() if self.generated or key in _DEFAULTS}, name
        )

    def __len__(self) -> int:
        return self.config.tasks.dataset_size if self.generated else super().__len__()

    def problem(self, index: int) -> Problem:
        entry = self._generate(index) if self.generated else self._rows[index]
        settings = self._settings
        question = (settings.prompt or QUESTION).format(
            numbers=list(entry["numbers"]),
            target=entry["target"],
            operators=", ".join(settings.operators),
            rule="must be used exactly once" if settings.use_all_numbers else "can only be used once",
            example=next(_EXAMPLES[operator] for operator in "/*-+" if operator in settings.operators),
        )
        answer = {key: value for key, value in entry.items() if key != "messages"}
        return self.make_problem(index, question, answer, entry.get("messages", ()))

    def score(self, problem: Problem, text: str) -> TaskScore:
        answer = extract_tag(text)
        if answer is None:
            return TaskScore(correct=False, reward=0.0)
        settings, entry = self._settings, problem.answer
        equation = check_equation(
            answer, entry["numbers"], entry["target"], settings.use_all_numbers, "".join(settings.operators)
        )
        reward = 1.0 if equation.correct else settings.base_reward if equation.well_formed else 0.0
        return TaskScore(correct=equation.correct, reward=reward, answer=answer)

    @property
    def evaluates_text(self) -> bool:
        return False

    def gold(self, problem: Problem) -> str:
        entry = problem.answer
        solution = entry.get("solution") or solve(entry["numbers"], entry["target"], self._settings)
        return f"{NO_THOUGHTS}<answer>{solution or 'no solution found'}</answer>"

    def columns(self, problem: Problem) -> dict[str, Any]:
        entry = problem.answer
        return {
            "answer": entry.get("solution"),
            "numbers": list(entry["numbers"]),
            "nums": list(entry["numbers"]),
            "target": entry["target"],
        }

    def _generate(self, index: int) -> dict[str, Any]:
        settings = self._settings
        generator = random.Random(seed(self.seed, index))
        limit = 10 * max(settings.max_target, settings.max_value)
        for attempt in range(5_000):
            count = generator.randint(settings.min_numbers, settings.max_numbers)
            numbers = [generator.randint(settings.min_value, settings.max_value) for _ in range(count)]
            term = _combine(generator, [_Term(n, str(n), "") for n in numbers], settings.operators, limit)
            if term is None or not settings.min_target <= term.value <= settings.max_target:
                continue
            if term.value in numbers and not settings.use_all_numbers and attempt < 2_500:
                continue  # writing that one number down would do
            return {"numbers": tuple(numbers), "target": term.value, "solution": term.text}
        raise UserError(
            f"The task {self.name} finds no target from {settings.min_target} to {settings.max_target} with "
            f"{settings.min_numbers} to {settings.max_numbers} numbers from {settings.min_value} to "
            f"{settings.max_value}: widen its config."
        )

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        numbers = self._reader.find("numbers_column", ("nums", "numbers"), is_needed=True)
        target = self._reader.find("target_column", ("target", "answer"), is_needed=True)
        messages = self._reader.find("messages_column", ("messages",))
        entries = [
            {
                "numbers": _integers(cell(row, numbers), f"{self._where}, row {i},", numbers),
                "target": _integer(cell(row, target), f"{self._where}, row {i},", target),
                "messages": read_messages(cell(row, messages), messages, f"{self._where}, row {i}"),
            }
            for i, row in enumerate(self._raw, 1)
        ]
        return self._own_side(entries, [f"{sorted(row['numbers'])} {row['target']}" for row in entries])


def _check(settings: dict[str, Any], task: str) -> Settings:
    check_setting_names(settings, (*_DEFAULTS, "path"), task)
    try:
        valid = TypeAdapter(Settings).validate_python(settings)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"The task {task} has {name} {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}."
        ) from None
    for name in ("numbers", "value", "target"):
        low, high = getattr(valid, f"min_{name}"), getattr(valid, f"max_{name}")
        if low > high:
            raise UserError(f"The task {task} has min_{name} {low} above max_{name} {high}: swap them.")
    if not valid.operators or any(operator not in _EXAMPLES for operator in valid.operators):
        raise UserError(f"The task {task} has operators {list(valid.operators)}: choose from + - * /.")
    if valid.prompt is not None:
        what = f"The setting `prompt` of task {task}"
        check_template(valid.prompt, ("numbers", "target", "operators", "rule", "example"), what)
        for field in ("{numbers}", "{target}"):
            if field not in valid.prompt:
                raise UserError(f"{what} has no {field}: the model would not see it.")
    return valid


def _integer(value: Any, where: str, column: str) -> int:
    if value is None:
        raise UserError(f"{where} has no {column}: give it, or leave the row out.")
    text = str(value).strip()
    if isinstance(value, bool) or not re.fullmatch(r"[-+]?\d{1,15}(\.0*)?", text):
        raise UserError(f"{where} has {rows.short_repr(value)} as {column}, where a whole number should be.")
    return int(text.split(".")[0])


def _integers(value: Any, where: str, column: str) -> tuple[int, ...]:
    if isinstance(value, str):  # a CSV cell: "[1, 2, 3]" or "1 2 3"
        value = value.strip("[]() ").replace(",", " ").split()
    if value is None:
        raise UserError(f"{where} has no {column}: give it, or leave the row out.")
    if not isinstance(value, list | tuple) or not 0 < len(value) <= _MAX_NUMBERS:
        raise UserError(
            f"{where} has {rows.short_repr(value)} as {column}, where a list of numbers should "
            f"be, 1 to {_MAX_NUMBERS}."
        )
    return tuple(_integer(entry, where, column) for entry in value)


@dataclass(frozen=True)
class _Term:
    value: int
    text: str
    operator: str  # the outermost one, "" for a number


def _combine(
    generator: random.Random, terms: list[_Term], operators: tuple[str, ...], limit: int
) -> _Term | None:
    """A random expression over all terms, with whole positive results up to `limit`; None where it fails."""
    while len(terms) > 1:
        right = terms.pop(generator.randrange(len(terms)))
        left = terms.pop(generator.randrange(len(terms)))
        choices = [
            term
            for operator in operators
            if (term := _apply(left, right, operator)) is not None and term.value <= limit
        ]
        if not choices:
            return None
        terms.append(generator.choice(choices))
    return terms[0]


def _apply(left: _Term, right: _Term, operator: str) -> _Term | None:
    a, b = left.value, right.value
    value = {"+": a + b, "-": a - b, "*": a * b, "/": 0 if a % b else a // b}[operator]
    text = f"{_inside(left, operator, False)} {operator} {_inside(right, operator, True)}"
    return _Term(value, text, operator) if value > 0 else None


def _inside(term: _Term, operator: str, is_right: bool) -> str:
    """A term inside another, with parentheses where they are needed."""
    weak, tight = term.operator in ("+", "-"), operator in "*/"
    bare = (
        not term.operator
        or (not is_right and not (weak and tight))
        or (is_right and operator == "+")
        or (operator == "*" == term.operator)
    )
    return term.text if bare else f"({term.text})"


def solve(numbers: tuple[int, ...], target: int, settings: Settings) -> str | None:
    """An expression that makes the target, by search; None where `_SEARCH_BUDGET` steps find none."""
    remaining = _SEARCH_BUDGET

    def search(terms: list[tuple[Fraction, str]]) -> str | None:
        nonlocal remaining
        for value, text in terms:
            if value == target and (len(terms) == 1 or not settings.use_all_numbers):
                return text
        for i, (a, a_text) in enumerate(terms):
            for j, (b, b_text) in enumerate(terms):
                if i == j or remaining <= 0:
                    continue
                rest = [term for k, term in enumerate(terms) if k not in (i, j)]
                for operator in settings.operators:
                    if (operator in "+*" and i > j) or (operator == "/" and b == 0):
                        continue
                    remaining -= 1
                    value = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else a}[operator]
                    expression = search([*rest, (value, f"({a_text} {operator} {b_text})")])
                    if expression:
                        return expression
        return None

    return search([(Fraction(number), str(number)) for number in numbers])
