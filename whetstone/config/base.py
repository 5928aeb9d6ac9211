"""The base of every section: a frozen model whose fields are documented by the text below them.

Numbers are finite and bounded (tests/config/test_bounds.py walks them all); a switch is no number.
"""

import ast
import functools
import inspect
from collections.abc import Mapping
from enum import Enum
from itertools import pairwise
from typing import Annotated, Any, ClassVar, get_args

from annotated_types import Le
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.functional_validators import AfterValidator, BeforeValidator, model_validator

# Bounds that several sections share: wide enough for any real run, narrow enough that none can hang.
MAX_STEPS = 100_000_000
MAX_COUNT = 1_000_000
MAX_SECONDS = 7 * 86_400.0
MIN_TEMPERATURE = 1e-6
MAX_SEED = 2**32 - 1  # what numpy takes

Name = Annotated[str, StringConstraints(max_length=4_096)]
Text = Annotated[str, StringConstraints(max_length=1_000_000)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]


def _steps_or_fraction(value: float) -> float:
    if value < 1 or not isinstance(value, float):
        return 0 if value == 0 else value
    if not value.is_integer():
        raise ValueError("write a whole number of steps, or a fraction of all steps below 1")
    return int(value)


# TRL's way to count: so many steps, or below 1 a fraction of all steps.
Steps = Annotated[int | float, Field(ge=0, le=MAX_STEPS), AfterValidator(_steps_or_fraction)]


def _greedy_or_positive(value: float | None) -> float | None:
    if value is not None and 0 < value < MIN_TEMPERATURE:
        raise ValueError(f"write 0 for greedy sampling, or at least {MIN_TEMPERATURE:f}")
    return value


# Logits are divided by it, in float32.
Temperature = Annotated[float | None, Field(ge=0, le=1_000), AfterValidator(_greedy_or_positive)]


def accept(spellings: Mapping[bool | None, Any]) -> BeforeValidator:
    """Other spellings of a key's values: `Annotated[Literal["all", "none"], accept({True: "all"})]`."""
    return BeforeValidator(lambda v: spellings.get(v, v) if isinstance(v, bool | None) else v)


class Resume(Enum):
    """What a resumed run may do with a key: `Annotated[int, Resume.SAFE]`, or for a whole section."""

    SAFE = "may change it: it does not affect what the run computes"
    NOTED = "may change it, from that step on, which is logged"
    FIXED = "must not change it: the checkpoint would not fit the model"


class Section(BaseModel):
    """Base of all sections."""

    resume: ClassVar[Resume] = Resume.NOTED  # of keys that say nothing else
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        allow_inf_nan=False,
        defer_build=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _a_switch_is_no_number(cls, values: Any) -> Any:
        """`--max_steps` without a value reads as true, which pydantic would take for 1."""
        for key, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, bool) and key in cls.model_fields and _takes_numbers_only(cls, key):
                raise ValueError(f"{key} takes a number, not {str(value).lower()}")
        return values


@functools.cache
def key_descriptions(section: type[Section]) -> dict[str, str]:
    """Each key with the text below it.

    Read from the source when asked: pydantic would do it at import, a third of the time that a worker takes.
    """
    descriptions: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if not issubclass(base, Section):
            continue
        try:
            (definition,) = ast.parse(inspect.getsource(base)).body
        except OSError:  # installed as bytecode only
            continue
        assert isinstance(definition, ast.ClassDef)
        for lines in pairwise(definition.body):
            match lines:
                case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str(text))):
                    descriptions[key] = inspect.cleandoc(text)
    return descriptions


def _takes_numbers_only(section: type[BaseModel], key: str) -> bool:
    field = section.model_fields[key]
    kinds = _types(field.annotation)
    if kinds == {int} and Le(1) in field.metadata:  # 0 or 1: a switch will do
        return False
    return bool(kinds & {int, float}) and bool not in kinds


def _types(annotation: Any) -> set[Any]:
    """An annotation, the types of its union, and those inside `Annotated`."""
    return {annotation}.union(*map(_types, get_args(annotation)))
