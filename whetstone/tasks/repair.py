"""The task `repair`: problems of the task `code` in several turns, with some tests' output between them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from whetstone.config import Config, TaskSpec
from whetstone.environments.table import REPAIR
from whetstone.errors import UserError
from whetstone.rewards.programs import read_tests
from whetstone.sandbox import languages
from whetstone.tasks.code import CodeTask
from whetstone.types import Problem

_OWN = {"max_attempts": 3, "shown_tests": None}


class RepairTask(CodeTask):
    """The code task scores the last turn; the environment only answers."""

    description = "Programs in several turns: the failures of some tests are shown (config as of `code`)"
    default_settings: ClassVar[Mapping[str, Any]] = {**_OWN, **CodeTask.default_settings}

    def __init__(self, config: Config, name: str, spec: TaskSpec, split: str, shared: bool) -> None:
        own = {key: spec.config.get(key, default) for key, default in _OWN.items()}
        for key, value in own.items():
            if not (value is None and key == "shown_tests") and (type(value) is not int or value < 1):
                raise UserError(f"The task {name} has {key} {value!r}: give a whole number of at least 1.")
        others = {key: value for key, value in spec.config.items() if key not in _OWN}
        super().__init__(config, name, spec.model_copy(update={"config": others}), split, shared)
        self._max_attempts, self._num_shown = own["max_attempts"], own["shown_tests"]

    @classmethod
    def environments(cls, spec: TaskSpec) -> tuple[str, ...]:
        return (REPAIR,)

    def problem(self, index: int) -> Problem:
        problem = super().problem(index)
        return replace(
            problem,
            environment=REPAIR,
            scored_by_task=True,
            answer={
                **problem.answer,
                "seed": 0,
                "settings": {"max_attempts": self._max_attempts},
                "row": {"row": self._environment_row(problem)},
            },
        )

    def _environment_row(self, problem: Problem) -> dict[str, Any]:
        row, programs = problem.answer, self.config.programs
        tests = read_tests(row["tests"], languages.LANGUAGES[row["language"]], row["function"], problem.id)
        scored = self._select_tests(tests, problem)
        num_shown = self._num_shown or (len(scored) + 1) // 2
        return {
            **{key: row[key] for key in ("tests", "language", "function", "before")},
            "shown": [number for number, test in enumerate(tests) if test in scored[:num_shown]],
            "limits": vars(self._limits(row)),
            "isolation": programs.sandbox_isolation,
            "use_reasoning_format": programs.use_reasoning_format,
        }
