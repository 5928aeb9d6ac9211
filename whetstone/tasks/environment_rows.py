"""The task `environment`: TRL's `environment_factory` with rows of the user's own, each given to `reset`.

The prompt is the row's, where it has one, with what `reset(**row)` returns behind it, as in TRL. Without rows
the environment makes its own problems from a seed. `factory` may be a mapping: then the column `environment`
of a row says which of them it is for.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from whetstone.config import Config, TaskSpec
from whetstone.config.plugins import users_code
from whetstone.environments.adapter import GymEpisode, ToolEpisode, open_episode, open_problem
from whetstone.environments.table import factory_of, is_known
from whetstone.errors import UserError
from whetstone.seeds import seed
from whetstone.tasks import rows
from whetstone.tasks.base import check_setting_names
from whetstone.tasks.row_reader import PROMPT_COLUMNS, cell, read_messages
from whetstone.types import Problem, TaskScore

SELECTOR = "environment"  # the column that selects among several environments


class EnvironmentRowsTask(rows.RowTask):
    description = (
        "An environment with your own rows (docs/environments.md; factory=my_env.py:MyEnv path=FILE)"
    )
    default_settings = rows.row_settings("environment")

    def __init__(self, config: Config, name: str, spec: TaskSpec, split: str, shared: bool) -> None:
        super().__init__(config, name, spec, split, shared)
        check_setting_names(self.settings, tuple(self.default_settings), name)
        self.generated = not (self.settings.get("path") or self.settings.get("dataset"))
        if not self.generated:
            rows.check_settings(self.settings, self.default_settings, name)
        self._factories = _factories(self.settings, name)
        if self.generated and None not in self._factories:
            raise UserError(
                f"The task {name} has several environments, which only rows can choose from: set data_path "
                f"to rows with a column `{SELECTOR}`."
            )

    @classmethod
    def environments(cls, spec: TaskSpec) -> tuple[str, ...]:
        return tuple(_factories(spec.config, "environment").values())

    def __len__(self) -> int:
        return self.config.tasks.dataset_size if self.generated else len(self._rows)

    @cached_property
    def _episodes(self) -> dict[str | None, GymEpisode | ToolEpisode]:
        settings = self.settings.get("settings") or {}
        with users_code(f"The environment of {self.name} could not be constructed"):
            return {key: open_episode(factory_of(f), settings) for key, f in self._factories.items()}

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        column = self._reader.find("prompt_column", PROMPT_COLUMNS)
        self._reader.also_used = tuple(self._reader.columns)  # `reset` gets all
        usable = []
        for number, row in enumerate(self._raw, 1):
            where = f"{self._where}, row {number}"
            key = None if None in self._factories else row.get(SELECTOR)
            if key not in self._factories:
                raise UserError(
                    f"{where} has {rows.short_repr(key)} as `{SELECTOR}`: environment_factory has "
                    f"{', '.join(map(str, self._factories))}."
                )
            messages = read_messages(cell(row, column), column, where)
            plain = {name: value for name, value in row.items() if key is None or name != SELECTOR}
            usable.append({"messages": messages, "key": key, "row": _plain_row(plain, where)})
        return self._own_side(usable, [json.dumps(entry["row"], sort_keys=True) for entry in usable])

    def problem(self, index: int) -> Problem:
        entry = {"messages": (), "key": None, "row": {}} if self.generated else self._rows[index]
        number, row = seed(self.seed, index) >> 32, entry["row"]  # numpy takes at most 32 bits
        episode = self._episodes[entry["key"]]
        with users_code(f"The environment of {self.name} could not be reset with the row of problem {index}"):
            opening, own_messages = open_problem(episode, number, row)
        *before, last = own_messages or entry["messages"] or ({"role": "user", "content": ""},)
        messages = (*before, {**last, "content": last["content"] + opening})
        if not messages[-1]["content"]:
            raise UserError(
                f"The environment of {self.name} returned no text from reset, and the row has no prompt: "
                "give either."
            )
        settings = self.settings.get("settings") or {}
        answer = {"seed": number, "settings": settings, "row": row}
        problem = self.make_problem(index, messages[-1]["content"], answer, messages)
        environment = self._factories[entry["key"]]
        return replace(
            problem, environment=environment, tools=tuple(episode.schemas), takes_calls=episode.takes_calls
        )

    def score(self, problem: Problem, text: str) -> TaskScore:
        return TaskScore(correct=False, reward=0.0)  # no episode, so no judgement

    def columns(self, problem: Problem) -> dict[str, Any]:
        return {"seed": problem.answer["seed"], **problem.answer["row"]}


def _factories(settings: Mapping[str, Any], task: str) -> dict[str | None, str]:
    """Value of the column `environment` -> class; None: the one for all rows."""
    factory = settings.get("factory")
    table = factory if isinstance(factory, Mapping) else {None: factory}
    if not table or not all(isinstance(spec, str) and is_known(spec) for spec in table.values()):
        raise UserError(
            f"The task {task} needs an environment: set environment_factory=my_env.py:MyEnv (or gem:..., "
            "textarena:..., skyrl:...), or a mapping of names to such environments."
        )
    return dict(table)


def _plain_row(row: dict[str, Any], where: str) -> dict[str, Any]:
    """The row as JSON has it: it goes to another process."""
    try:
        return json.loads(json.dumps(row))
    except (TypeError, ValueError):
        raise UserError(
            f"{where} has a value that is no plain data: write text, numbers and lists."
        ) from None
