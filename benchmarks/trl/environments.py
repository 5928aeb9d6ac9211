"""Environments and tools of a configuration in the hands of TRL, whose own loop calls them in its process.

An environment in TRL's shape becomes a class that TRL constructs once and resets for each episode; a reset
here constructs it anew, with the problem's seed, settings and row. Rewards stay with our scorer.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from whetstone.config import Config
from whetstone.config.plugins import describe_error
from whetstone.environments.adapter import ToolEpisode
from whetstone.environments.table import factory_of, is_named
from whetstone.environments.toolbox import load_tool, tool_schemas
from whetstone.errors import UserError
from whetstone.tasks.registry import environments_of
from whetstone.types import Problem

NO_ENVIRONMENT = "none"  # of problems without one, beside others: TRL wants one for each


def check_environments(config: Config) -> None:
    """Refuse what TRL's loop can't run."""
    for name in environments_of(config):
        factory = None if is_named(name) else factory_of(name)
        if not isinstance(factory, type) or hasattr(factory, "step"):
            raise UserError(
                f"TRL's loop can't run {name}: it calls the methods of a class as tools, and knows no `step` "
                "(Gymnasium's shape) and no function that returns an environment. Write a class with `reset` "
                "and tools (docs/environments.md), or use `whet train`."
            )
    for spec in config.environments.tools:
        if isinstance(load_tool(spec), type):
            raise UserError(
                f"tools names {spec}, a class with an instance for each episode, but TRL's tools are "
                "functions: set environment_factory to such a class, or use `whet train`."
            )
    tool_schemas(config.environments.tools)  # refuses what can't be described


def loop_arguments(config: Config, problem: Callable[[int], Problem]) -> dict[str, Any]:
    """`tools` and `environment_factory` of GRPOTrainer; nothing without environments and tools."""
    arguments: dict[str, Any] = {}
    if config.environments.tools:
        arguments["tools"] = [load_tool(spec) for spec in config.environments.tools]
    if names := environments_of(config):
        factories = {name: episode_class(factory_of(name), problem) for name in names}
        arguments["environment_factory"] = {**factories, NO_ENVIRONMENT: NoEnvironment}
    return arguments


class NoEnvironment:
    """For problems that have none."""

    def reset(self, **_: Any) -> None:
        return None


def episode_class(base: Any, problem: Callable[[int], Problem]) -> Callable[[], Any]:
    """A factory for TRL: the user's class, whose `reset` is told the number of a problem.

    The prompt has the text of `reset` already, as in our own rollout, so TRL is given none.
    """

    def reset(self: Any, index: int, **_: Any) -> None:
        answer = problem(index).answer
        self.__dict__.clear()
        error = None
        try:
            self.__init__(**answer["settings"])
            opened = ToolEpisode(_Own(self), {}).reset(answer["seed"], answer.get("row", {}))
            shown = str(problem(index).messages[-1]["content"]).rstrip()
            if not shown.endswith(opened["observation"].strip()):
                error = "reset said something else than before with the same seed: it must depend on it only"
        except Exception as raised:  # costs this episode its reward, as in our own rollout
            error = describe_error(raised)
        self._whetstone_error = error

    # TRL would pay `get_reward` beside our reward, which has it.
    kind = type(base.__name__, (base,), {"reset": reset, "get_reward": None})
    return lambda: kind.__new__(kind)


class _Own:
    """What the user's class has and the class for TRL replaces."""

    def __init__(self, environment: Any) -> None:
        own = super(type(environment), environment)
        self.reset = own.reset  # type: ignore[misc]
        if hasattr(own, "get_reward"):
            self.get_reward = own.get_reward  # type: ignore[misc]
        self.correct = getattr(environment, "correct", None)


def judge(environment: Any, last: str) -> tuple[dict[str, Any], str | None]:
    """What an episode earned, for the task that scores it, and why it failed."""
    error, finished = environment._whetstone_error, {}
    if error is None:
        try:
            finished = ToolEpisode(_Own(environment), {}).finish()
        except Exception as raised:
            error = describe_error(raised)
    if error is not None:
        return {"reward": 0.0, "correct": False, "last": last}, error
    reward, correct = finished.get("reward"), finished.get("correct")
    if correct is None and reward is not None:
        correct = reward >= 1
    return {"reward": reward, "correct": correct, "last": last}, None


def count_calls(messages: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Calls of tools that were answered, and those of them that failed."""
    results = [message for message in messages if message["role"] == "tool"]
    return len(results), sum(str(message["content"]).startswith("{'error':") for message in results)
