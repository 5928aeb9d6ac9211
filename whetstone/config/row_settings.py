"""Settings of the tasks that read rows, as plain keys: `answer_column=result` beside `max_steps=10`.

A plain key goes to the one task of `datasets` that has such a setting.
"""

from collections.abc import Mapping
from typing import Any

from whetstone.errors import UserError

SOURCE_KEYS = ("path", "dataset", "name", "split", "eval_path", "eval_split", "eval_fraction", "max_samples")
QUESTION_KEYS = ("question_column", "prompt_column", "answer_column", "solution_column")
# kind of task -> its settings
ROW_SETTINGS: dict[str, tuple[str, ...]] = {
    "math": (*SOURCE_KEYS, *QUESTION_KEYS),
    "rows": (*SOURCE_KEYS, *QUESTION_KEYS, "match"),
    "code": (
        *SOURCE_KEYS, "language", "statement_column", "tests_column", "test_fields", "prompt",
        "continue_starter",
    ),
    "countdown": (
        *SOURCE_KEYS, "numbers_column", "target_column", "messages_column", "operators", "use_all_numbers",
        "base_reward",
    ),
}  # fmt: skip
PLAIN_KEYS = frozenset(key for keys in ROW_SETTINGS.values() for key in keys)


def place_settings(
    values: dict[str, Any], before: Mapping[str, Any], reserved: Mapping[str, Any] | frozenset[str]
) -> dict[str, Any]:
    """`values` with plain settings moved into the task of `datasets` that has them, unless `reserved`."""
    plain = [key for key in values if key in PLAIN_KEYS and key not in reserved]
    datasets = values.get("datasets") or before.get("datasets")
    if not plain or not isinstance(datasets, Mapping):
        return values
    specs, left = dict(datasets), dict(values)
    for key in plain:
        fitting = [name for name in specs if key in ROW_SETTINGS.get(str(name).split("/")[0], ())]
        if len(fitting) > 1:
            raise UserError(
                f"{key} may be meant for {' or '.join(fitting)}: write datasets.{fitting[0]}.config.{key}, "
                "or put it under its task in `datasets`."
            )
        spec = (specs[fitting[0]] or {}) if fitting else None
        if isinstance(spec, Mapping) and isinstance(spec.get("config") or {}, Mapping):
            specs[fitting[0]] = {**spec, "config": {**(spec.get("config") or {}), key: left.pop(key)}}
    return {**left, "datasets": specs} if len(left) < len(values) else values
