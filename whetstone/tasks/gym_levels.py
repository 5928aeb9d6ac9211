"""reasoning-gym's curricula as plain settings: the config of a task at each level of difficulty.

A level is reasoning-gym's "global level": every attribute is at it, or at its own maximum. Ranges keep their
easy end, so that a level contains the problems of the levels below. Some curricula have levels that their own
task refuses: the levels end before the first of these.
"""

from typing import Any

from whetstone.errors import UserError


def settings_at(task: str, level: int, settings: dict[str, Any]) -> dict[str, Any]:
    """`settings` with what the curriculum says of `level` put in."""
    from whetstone.tasks.gym_package import RangeAttributeDefinition, create_curriculum

    curriculum = create_curriculum(task)
    curriculum.set_global_level(level)
    level_config = curriculum.generate_configuration(dict(settings))
    fields: list[str] = []
    attributes: list[Any] = [*curriculum.attributes.values()]
    for attribute in attributes:
        if isinstance(attribute, RangeAttributeDefinition):
            fields += [attribute.lower_field_name, attribute.upper_field_name]
        else:
            fields.append(attribute.field_name)
    return {**settings, **{field: getattr(level_config, field) for field in fields}}


def top_level(task: str, settings: dict[str, Any]) -> int:
    """The highest level up to which the task accepts every one; -1 where it accepts none or has none."""
    from whetstone.tasks.gym_package import CURRICULA, DATASETS, create_curriculum

    if task not in CURRICULA:
        return -1
    attributes = create_curriculum(task).attributes.values()
    highest = max((len(attribute.levels) for attribute in attributes), default=0) - 1
    for level in range(highest + 1):
        try:
            level_config = DATASETS[task][1](**settings_at(task, level, settings))
            if hasattr(level_config, "validate"):
                level_config.validate()
        except (AssertionError, ValueError, TypeError, KeyError, IndexError):
            return level - 1
    return highest


def check_levels(task: str, settings: dict[str, Any], start: int, top: int | None) -> int:
    """The highest level of training; raises where a level does not exist."""
    highest = top_level(task, settings)
    if highest < 1:
        raise UserError(
            f"The task {task} has no curriculum that works with its config: leave `curriculum` out of its "
            "entry in datasets. `whet tasks` says at its end which tasks have one."
        )
    for name, value in (("start", start), ("top", top)):
        if value is not None and value > highest:
            raise UserError(f"Task {task} has levels 0 to {highest}, but its {name} is {value}: lower it.")
    return highest if top is None else top


def describe_levels(task: str, settings: dict[str, Any]) -> str:
    """`levels 0 to 10: max_terms 2 to 12, max_digits 1 to 10`; empty without a curriculum."""
    highest = top_level(task, settings)
    if highest < 1:
        return ""
    first, last = settings_at(task, 0, settings), settings_at(task, highest, settings)
    changes = [f"{key} {first[key]} to {last[key]}" for key in first if first[key] != last[key]]
    return f"levels 0 to {highest}: {', '.join(changes)}"
