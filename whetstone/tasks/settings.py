"""The settings of a task with their defaults, for `whet tasks NAME`. The tasks check them."""

import dataclasses
from typing import Any

from whetstone.config.plugins import is_plugin
from whetstone.config.row_settings import ROW_SETTINGS
from whetstone.tasks import countdown, gym, rows
from whetstone.tasks.registry import task_class

# A default is None where a column is found by its name or a row source is chosen.
_ROW_DEFAULTS: dict[str, Any] = {
    "split": "train",
    "eval_fraction": rows.DEFAULT_EVAL_FRACTION,
    "continue_starter": False,
}


def settings_of(name: str) -> dict[str, Any]:
    """Setting -> default, in the task's own order; empty for a task that is not known."""
    kind = name.split("/")[0]
    if kind in ROW_SETTINGS:
        generated = _defaults(countdown.Settings) if kind == "countdown" else {}
        return {
            **generated,
            **{key: _ROW_DEFAULTS.get(key) for key in ROW_SETTINGS[kind] if key not in generated},
        }
    if is_plugin(name):
        return dict(task_class(name).default_settings)
    return gym.default_settings(gym.gym_name(name))


def _defaults(kind: Any) -> dict[str, Any]:
    """The defaults of a pydantic dataclass."""
    return {field.name: getattr(kind(), field.name) for field in dataclasses.fields(kind)}
