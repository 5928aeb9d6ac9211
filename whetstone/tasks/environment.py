"""Tasks whose problems are episodes of an environment, which answers every turn and gives the reward."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from whetstone.config import Config, TaskSpec
from whetstone.config.plugins import users_code
from whetstone.environments.adapter import open_episode, open_problem
from whetstone.environments.games import GAMES
from whetstone.seeds import seed
from whetstone.tasks.base import Task
from whetstone.types import Problem, TaskScore


class EnvironmentTask(Task):
    """A problem opens with what `reset` returns in this process; the episode runs in a process of its own."""

    generated = True
    environment: ClassVar[str]  # its name in a configuration
    factory: ClassVar[Callable[..., Any]]

    def __init__(self, config: Config, name: str, spec: TaskSpec, split: str, shared: bool) -> None:
        super().__init__(config, name, spec, split, shared)
        if "split" in self.default_settings:  # a game whose secrets would be the same in both
            self.settings = {"split": split, **self.settings}
        with users_code(f"The environment of {name} could not be constructed"):
            self._episode = open_episode(type(self).factory, self.settings)

    @classmethod
    def environments(cls, spec: TaskSpec) -> tuple[str, ...]:
        return (cls.environment,)

    def problem(self, index: int) -> Problem:
        number = seed(self.seed, index) >> 32  # 31 bits: numpy takes no more than 32
        with users_code(f"The environment of {self.name} could not be reset"):
            opening, messages = open_problem(self._episode, number, {})
        answer = {"seed": number, "settings": self.settings}
        problem = self.make_problem(index, opening, answer, tuple(messages))
        return replace(
            problem,
            environment=self.environment,
            tools=tuple(self._episode.schemas),
            takes_calls=self._episode.takes_calls,
        )

    def score(self, problem: Problem, text: str) -> TaskScore:
        return TaskScore(correct=False, reward=0.0)  # no episode, so no judgement

    def columns(self, problem: Problem) -> dict[str, Any]:
        return {"seed": problem.answer["seed"]}


def environment_task(
    name: str, factory: Callable[..., Any], description: str = "", settings: Mapping[str, Any] | None = None
) -> type[EnvironmentTask]:
    """The task of an environment that a configuration names."""
    fields = {
        "environment": name,
        "factory": staticmethod(factory),
        "description": description,
        "default_settings": settings or {},
    }
    return type("EnvironmentTask", (EnvironmentTask,), fields)


GAME_TASKS = {
    name: environment_task(name, game, game.description, game.default_settings)
    for name, game in GAMES.items()
}
