"""The settings of a task with their defaults, for `whet tasks NAME`. Checks nothing: the tasks do that."""

import dataclasses
from typing import Any

from whetstone.tasks import code, countdown, gym, math

# Kinds that read rows. A default is None where a column is found by its name or a row source is chosen.
_ROW_KEYS: dict[str, tuple[str, ...]] = {
    "math": math.KEYS,
    "code": code.KEYS,
    "countdown": countdown.ROW_KEYS,
}
_ROW_DEFAULTS: dict[str, Any] = {
    "split": "train",
    "eval_share": math.DEFAULT_EVAL_SHARE,
    "continue_starter": False,
}


def settings_of(name: str) -> dict[str, Any]:
    """Setting -> default, in the task's own order; empty for a task that is not known."""
    kind = name.split("/")[0]
    if kind in _ROW_KEYS:
        generated = _defaults(countdown.Settings) if kind == "countdown" else {}
        return {
            **generated,
            **{key: _ROW_DEFAULTS.get(key) for key in _ROW_KEYS[kind] if key not in generated},
        }
    return gym.default_settings(gym.gym_name(name))


def _defaults(kind: Any) -> dict[str, Any]:
    """The defaults of a pydantic dataclass."""
    return {field.name: getattr(kind(), field.name) for field in dataclasses.fields(kind)}
