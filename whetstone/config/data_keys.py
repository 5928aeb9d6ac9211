"""Top-level keys of a data set (`dataset_name`, splits, columns, `max_samples`) -> settings of a task.

Where no task is named, `environment` and `environment_factory` mean the task `environment`, `dataset_name`
the task `rows` and `data_path` the task `math`. Any setting of a task that reads rows is also a plain key,
which goes to the one task that has it. Reads no data.
"""

from collections.abc import Mapping
from typing import Any

from whetstone.errors import UserError

SOURCE_KEYS = ("path", "dataset", "name", "split", "eval_path", "eval_split", "eval_fraction", "max_samples")
QUESTION_KEYS = (
    *("prompt", "prompt_column", "question_column", "choices_column", "tools_column", "answer_column"),
    "solution_column",
)
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
        "base_reward", "prompt",
    ),
    "repair": (
        *SOURCE_KEYS, "language", "statement_column", "tests_column", "test_fields", "prompt",
        "continue_starter", "max_attempts", "shown_tests",
    ),
    "environment": (*SOURCE_KEYS, "prompt_column", "factory", "settings"),
}  # fmt: skip
PLAIN_KEYS = frozenset(key for keys in ROW_SETTINGS.values() for key in keys)
# key -> the setting of a task that it means
SETTINGS: dict[str, str] = {
    "dataset_name": "dataset",
    "dataset_id_or_path": "dataset",
    "dataset_path": "dataset",
    "train_dataset": "dataset",
    "eval_dataset": "eval_path",
    "data_path": "path",
    "train_file": "path",
    "train_split_ratio": "eval_fraction",
    "eval_data_path": "eval_path",
    "dataset_config": "name",
    "dataset_configs": "name",
    "dataset_train_split": "split",
    "dataset_test_split": "eval_split",
    "dataset_prompt_column": "prompt_column",
    "prompt_column": "prompt_column",
    "question_column": "prompt_column",
    "dataset_answer_column": "answer_column",
    "dataset_solution_column": "answer_column",
    "answer_column": "answer_column",
    "max_samples": "max_samples",
    "max_train_problems": "max_samples",
    "environment_factory": "factory",
    "environment": "factory",
}
# What the columns of prompt and answer are called by tasks that have their own names for them.
COLUMNS: dict[str, dict[str, str]] = {
    "code": {"prompt_column": "statement_column", "answer_column": "tests_column"},
    "repair": {"prompt_column": "statement_column", "answer_column": "tests_column"},
    "countdown": {"prompt_column": "messages_column", "answer_column": "target_column"},
}
_SOURCES = ("path", "dataset")
ALL = -1  # of max_samples


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


class DataKeys:
    """The data keys of all layers. Settings without a data set wait for one."""

    def __init__(self) -> None:
        self._waiting: dict[str, Any] = {}  # settings without a task so far
        self._named: dict[str, tuple[str, str]] = {}  # setting -> (key, origin)
        self._limit: int | None = None

    def apply(
        self, values: dict[str, Any], before: dict[str, Any], ours: dict[str, Any], origin: str
    ) -> tuple[dict[str, Any], list[str]]:
        """Our keys (`datasets`, `dataset_size`) for the data keys among `values`, and notes of what was
        understood. `before`: our keys of earlier layers; `ours`: those of this one.
        """
        named = [key for key in values if key in SETTINGS]
        self._named |= {SETTINGS[key]: (key, origin) for key in named}
        settings = {**self._waiting, **_settings(values)}
        is_new = "datasets" in ours
        if not settings:
            return {}, []
        datasets = specs(ours if is_new else before)
        source = [key for key in _SOURCES if key in settings]
        has_source = any(set(_SOURCES) & set(spec.get("config") or {}) for spec in datasets.values())
        if source and not (is_new or has_source or any(map(_reads_rows, datasets))):
            datasets = {}  # a data set named later takes the place of generated problems
        if (
            "factory" in settings
            and not is_new
            and all(name.split("/")[0] != "environment" for name in datasets)
        ):
            datasets = {"environment": {}}
        if source and not datasets:
            datasets = {"rows" if "dataset" in settings else "math": {}}
        limit = settings.pop("max_samples", None)
        result = {}
        if not datasets:
            self._waiting = settings
        elif settings:
            self._waiting = {}
            result["datasets"] = datasets = _put(datasets, settings, self._named)
        result |= self._limited(datasets, limit, before)
        size = result.get("dataset_size")
        meaning = "all problems are used" if size is None else f"{size} problems are used"
        if settings and datasets:
            meaning = f"the rows of task {next(iter(datasets))}"
        return result, [f"{', '.join(named)} ({origin}): {meaning}."] if named else []

    def finish(self) -> list[str]:
        """A note of splits without a data set; columns without one are refused."""
        for setting in self._waiting:
            key, origin = self._named[setting]
            if setting.endswith("column"):
                raise UserError(f"{key} ({origin}) needs a data set: set dataset_name or data_path to it.")
        idle = [self._named[setting] for setting in self._waiting]
        return [f"{key} ({origin}) has no effect: no data set is named." for key, origin in idle]

    def _limited(self, datasets: dict[str, Any], limit: int | None, before: dict[str, Any]) -> dict[str, Any]:
        """`max_samples`: so many problems, and so many rows of each task that reads rows; -1: all."""
        old, self._limit = self._limit, self._limit if limit is None else limit
        if self._limit is None:
            return {}
        size: dict[str, Any] = {"dataset_size": self._limit}
        rows = self._limit
        if self._limit == ALL:
            rows = None
            size = {"dataset_size": None} if old is not None and before.get("dataset_size") == old else {}
        return size | ({"datasets": _limit(datasets, rows)} if datasets else {})


def specs(flat: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """`datasets` as it was written."""
    datasets = flat.get("datasets") or {}
    if not isinstance(datasets, dict):
        raise UserError("datasets is not a mapping of task names: write {chain_sum: {weight: 1.0}}.")
    if any(not isinstance(spec, dict | None) for spec in datasets.values()):
        raise UserError("datasets has a task whose entry is not a mapping: write {weight, config}.")
    if any(not isinstance((spec or {}).get("config") or {}, dict) for spec in datasets.values()):
        raise UserError("datasets has a task whose config is not a mapping: write {setting: value}.")
    return {str(name): dict(spec or {}) for name, spec in datasets.items()}


def _settings(values: dict[str, Any]) -> dict[str, Any]:
    """The task settings that data keys ask for; a key without a value asks for nothing."""
    settings: dict[str, Any] = {}
    for key, setting in SETTINGS.items():
        value = values.get(key)
        if setting == "max_samples" and value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value == 0 or value < ALL:
                raise UserError(f"{key} has to be how many problems to use, or -1 for all.")
        elif key == "dataset_configs" and isinstance(value, list):
            if len(value) > 1:
                raise UserError(
                    "dataset_configs names several configurations: give each its own entry in datasets, such "
                    "as {rows/a: {config: {dataset: ..., name: a}}}."
                )
            value = value[0] if value else None
        if value is None:
            continue
        if key == "train_split_ratio":
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
                raise UserError(f"train_split_ratio is {value}: give a fraction of the rows, such as 0.95.")
            settings[setting] = round(1 - value, 6)
            continue
        if setting != "max_samples" and not isinstance(value, str | dict if setting == "factory" else str):
            raise UserError(f"{key} has to be one name, not a {type(value).__name__} (rows: train_dataset).")
        if settings.setdefault(setting, value) != value:
            raise UserError(f"{key} and another key give the data set's {setting} twice: leave one out.")
    return settings


def _reads_rows(name: str) -> bool:
    return name.split("/")[0] in ROW_SETTINGS


def _put(
    datasets: dict[str, dict[str, Any]], settings: dict[str, Any], named: dict[str, tuple[str, str]]
) -> dict[str, dict[str, Any]]:
    fitting = [name for name in datasets if _reads_rows(name)]
    if len(fitting) != 1:
        key, origin = named[next(iter(settings))]
        what = "several tasks that read rows" if fitting else "no task that reads rows"
        raise UserError(
            f"{key} ({origin}) is for one data set, but datasets has {what}: give each its own config, such "
            "as rows: {config: {path: ...}}."
        )
    (name,) = fitting
    spec = datasets[name]
    own = COLUMNS.get(name.split("/")[0], {})
    config = dict(spec.get("config") or {})
    if set(_SOURCES) & set(settings):  # another data set: nothing of the old source holds for it
        for old in ("path", "dataset", "name", "split", "eval_split"):
            config.pop(old, None)
    config |= {own.get(setting, setting): value for setting, value in settings.items()}
    return {**datasets, name: {**spec, "config": config}}


def _limit(datasets: dict[str, dict[str, Any]], limit: int | None) -> dict[str, dict[str, Any]]:
    """So many rows of each task that reads rows; None: all."""
    limited = {}
    for name, spec in datasets.items():
        config = {key: value for key, value in (spec.get("config") or {}).items() if key != "max_samples"}
        if limit is not None and set(_SOURCES) & set(config):
            config["max_samples"] = limit
        limited[name] = {**spec, "config": config} if config or "config" in spec else spec
    return limited
