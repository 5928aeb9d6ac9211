"""Countdown: make the target from the numbers with + - * /, each number at most once (or exactly once, by a
setting).

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
from whetstone.config.row_settings import ROW_SETTINGS
from whetstone.errors import UserError, did_you_mean
from whetstone.rewards.answers import extract_tag
from whetstone.rewards.equations import check_equation
from whetstone.seeds import seed
from whetstone.tasks import rows
from whetstone.tasks.base import Task
from whetstone.tasks.prompts import conversation
from whetstone.types import Problem, TaskScore

QUESTION = (
    "Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic "
    "operations ({operators}) and each "
    "number {rule}. Show your work in <think> </think> tags. And return the final answer in <answer> "
    "</answer> tags, "
    "for example <answer> {example} </answer>."
)
_MAX_NUMBERS = 20  # in a row
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


_KEYS = tuple(Settings.__dataclass_fields__)
_GENERATED = tuple(key for key in _KEYS if key not in ROW_SETTINGS["countdown"])  # mean nothing to rows
logger = logging.getLogger(__name__)


class CountdownTask(Task):
    """One mixture entry of countdown problems."""

    description = (
        "Makes a target from given numbers, generated or from rows (reasoning-gym's own is "
        "reasoning_gym/countdown)"
    )
    isolated = True

    def __init__(self, config: Config, name: str, spec: TaskSpec, split: str, shared: bool) -> None:
        super().__init__(config, name, spec, split, shared)
        self.generated = not (spec.config.get("path") or spec.config.get("dataset"))
        if not self.generated:
            rows.check_settings(spec.config, (*ROW_SETTINGS["countdown"], *_GENERATED), name)
            unused = [key for key in spec.config if key in _GENERATED]
            if unused and split == "train":
                logger.info("%s reads rows, so %s has no effect.", name, ", ".join(unused))
        self._source = spec.config
        self._settings = _check(
            {key: value for key, value in spec.config.items() if self.generated or key in _KEYS}, name
        )

    def __len__(self) -> int:
        return self.config.tasks.dataset_size if self.generated else len(self._rows)

    def problem(self, index: int) -> Problem:
        entry = self._generate(index) if self.generated else self._rows[index]
        settings = self._settings
        question = QUESTION.format(
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
        return f"<think>\n</think>\n<answer>{solution or 'no solution found'}</answer>"

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
            f"{settings.min_numbers} to "
            f"{settings.max_numbers} numbers from {settings.min_value} to {settings.max_value}: widen its "
            "config."
        )

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        where = f"The data set {rows.source(self._source, self.split)[0]} of task {self.name}"
        raw = rows.read(self._source, self.split, self.name)
        numbers = rows.pick_column(
            raw, self._source.get("numbers_column"), ("nums", "numbers"), "numbers_column", where
        )
        target = rows.pick_column(
            raw, self._source.get("target_column"), ("target", "answer"), "target_column", where
        )
        default_column = "messages" if "messages" in rows.columns_of(raw) else None
        messages = self._source.get("messages_column") or default_column
        if messages is not None:
            rows.pick_column(raw, messages, (), "messages_column", where)
        entries = [
            {
                "numbers": _integers(row.get(numbers), where, i, numbers),
                "target": _integer(row.get(target), where, i, target),
                "messages": conversation(row.get(messages)) if messages is not None else (),
            }
            for i, row in enumerate(raw, 1)
        ]
        keys = [f"{sorted(row['numbers'])} {row['target']}" for row in entries]
        return rows.split_rows(entries, keys, self._source, self.split, self.shared, where)


def _check(settings: dict[str, Any], task: str) -> Settings:
    for key in settings:
        if key not in _KEYS:
            known = ", ".join(_KEYS)
            raise UserError(
                f"The task {task} has no setting '{key}'{did_you_mean(key, _KEYS) or '.'} Its settings are: "
                f"{known}, or path for rows."
            )
    try:
        valid = TypeAdapter(Settings).validate_python(settings)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"The task {task} has {name} {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}."
        ) from None
    for low, high in (
        ("min_numbers", "max_numbers"),
        ("min_value", "max_value"),
        ("min_target", "max_target"),
    ):
        if getattr(valid, low) > getattr(valid, high):
            raise UserError(
                f"The task {task} has {low} {getattr(valid, low)} above {high} {getattr(valid, high)}: swap "
                "or change them."
            )
    if not valid.operators or any(operator not in _EXAMPLES for operator in valid.operators):
        raise UserError(f"The task {task} has operators {list(valid.operators)}: choose from + - * /.")
    return valid


def _integer(value: Any, where: str, row: int, column: str) -> int:
    if value is None:
        raise UserError(f"{where} has no {column} in row {row}: give it, or leave the row out.")
    text = str(value).strip()
    if isinstance(value, bool) or not re.fullmatch(r"[-+]?\d{1,15}(\.0*)?", text):
        raise UserError(
            f"{where} has {rows.short_repr(value)} as {column} in row {row}, where a whole number should be."
        )
    return int(text.split(".")[0])


def _integers(value: Any, where: str, row: int, column: str) -> tuple[int, ...]:
    if isinstance(value, str):  # a CSV cell: "[1, 2, 3]" or "1 2 3"
        value = value.strip("[]() ").replace(",", " ").split()
    if value is None:
        raise UserError(f"{where} has no {column} in row {row}: give it, or leave the row out.")
    if not isinstance(value, list | tuple) or not 0 < len(value) <= _MAX_NUMBERS:
        raise UserError(
            f"{where} has {rows.short_repr(value)} as {column} in row {row}, where a list of numbers "
            f"(1 to {_MAX_NUMBERS}) should be."
        )
    return tuple(_integer(entry, where, row, column) for entry in value)


@dataclass(frozen=True)
class _Term:
    value: int
    text: str
    operator: str  # the outermost one, "" for a number


def _combine(
    generator: random.Random, terms: list[_Term], operators: tuple[str, ...], limit: int
) -> _Term | None:
    """One expression over all the terms, with whole positive results no larger than `limit`; None where the
    dice fail.
    """
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
    if operator in "+*":
        value = left.value + right.value if operator == "+" else left.value * right.value
    elif operator == "-":
        value = left.value - right.value
        if value <= 0:
            return None
    else:
        if left.value % right.value:
            return None
        value = left.value // right.value
    return _Term(
        value, f"{_inside(left, operator, False)} {operator} {_inside(right, operator, True)}", operator
    )


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


def solve(numbers: tuple[int, ...], target: int, settings: Settings, budget: int = 300_000) -> str | None:
    """An expression that makes the target from given numbers, by search; None where none was found within
    the budget.
    """
    remaining = budget

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
