"""Every number of the configuration has finite bounds, and no value beyond them is taken."""

import math
from typing import Any, get_args, get_origin

import pytest
from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from whetstone.config import Config, TaskSpec, build
from whetstone.config.base import Section
from whetstone.config.tasks import CurriculumSpec
from whetstone.errors import UserError

SECTIONS = [field.annotation for field in Config.model_fields.values()]
FIELDS = {
    f"{section.__name__}.{name}": field  # type: ignore[union-attr]
    for section in (*SECTIONS, TaskSpec, CurriculumSpec)
    for name, field in section.model_fields.items()  # type: ignore[union-attr]
}


def numbers(annotation: Any, metadata: list[Any]) -> list[tuple[Any, list[Any]]]:
    """(int or float, its constraints) for every number inside a type; `Annotated` adds constraints."""
    if annotation in (int, float):
        return [(annotation, metadata)]
    parts = get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return numbers(parts[0], [*metadata, *unfold(annotation.__metadata__)])
    if get_origin(annotation) is not None and get_origin(annotation) is dict:
        return []
    return [found for part in parts for found in numbers(part, metadata)]


def unfold(metadata: Any) -> list[Any]:
    """Constraints out of `Field(ge=...)`."""
    parts = [entry.metadata if isinstance(entry, FieldInfo) else [entry] for entry in metadata]
    return [constraint for part in parts for constraint in part]


def bound(constraint: Any) -> Any:
    match constraint:
        case Ge(ge=limit) | Gt(gt=limit) | Le(le=limit) | Lt(lt=limit):
            return limit
    raise AssertionError(constraint)


def test_every_section_refuses_what_is_not_finite() -> None:
    assert Section.model_config.get("allow_inf_nan") is False
    for section in SECTIONS:
        assert issubclass(section, Section)  # type: ignore[arg-type]
        assert section.model_config.get("allow_inf_nan") is False  # type: ignore[union-attr]


@pytest.mark.parametrize("name", FIELDS)
def test_every_number_has_finite_bounds(name: str) -> None:
    field = FIELDS[name]
    for _, constraints in numbers(field.annotation, list(field.metadata)):
        lower = [bound(entry) for entry in constraints if isinstance(entry, Ge | Gt)]
        upper = [bound(entry) for entry in constraints if isinstance(entry, Le | Lt)]
        assert lower and upper and all(math.isfinite(limit) for limit in (*lower, *upper)), name


KEYS = {
    key: field
    for section in SECTIONS
    for key, field in section.model_fields.items()  # type: ignore[union-attr]
    if numbers(field.annotation, list(field.metadata))
}


@pytest.mark.parametrize("key", KEYS)
def test_no_number_beyond_its_bounds_is_taken(key: str) -> None:
    for value in (math.inf, -math.inf, math.nan, 1e19, -1e19, True):
        if value is True and (bool in get_args(KEYS[key].annotation) or key == "async_rollouts"):
            continue
        given = [value, value] if key == "reward_weights" and value is not True else value
        with pytest.raises(UserError) as caught:
            build({key: given})
        assert key in str(caught.value) and "\n" not in str(caught.value)
