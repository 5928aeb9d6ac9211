"""One episode of an environment, whatever its interface: runs in the episode's own process.

Two shapes are known, by what the object has:

- Gymnasium's: `reset(seed=...) -> observation` or `(observation, info)`, where the observation is a text, or
  messages that are the prompt, and `step(text) -> (observation, reward, terminated, truncated, info)`;
- TRL's: `reset(**row) -> text or None`, public methods that are tools, and `get_reward()` where there is one.

`info["correct"]`, or an attribute `correct`, says whether the episode was won; otherwise a reward of 1 does.
"""

import contextlib
import inspect
import json
import math
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

from whetstone.config.plugins import awaited
from whetstone.environments.builtin_tools import ProgramRaised, ToolFailed
from whetstone.environments.openenv import OpenEnvEnvironment
from whetstone.environments.toolbox import methods_of
from whetstone.environments.tools import tool_schema
from whetstone.files import json_safe

MAX_TEXT = 1 << 20  # characters of an observation
MAX_STATE = 1 << 16  # characters of an environment's attributes, as JSON


class EnvironmentFailed(Exception):
    """The environment returned something that can't be used."""


def open_episode(
    factory: Callable[..., Any], settings: Mapping[str, Any], tools: Mapping[str, Any] | None = None
) -> "GymEpisode | ToolEpisode":
    """`tools`: of the run, beside the environment's own; an environment in Gymnasium's shape has none."""
    environment = factory(**settings)
    return GymEpisode(environment) if hasattr(environment, "step") else ToolEpisode(environment, tools or {})


class GymEpisode:
    schemas: tuple[dict[str, Any], ...] = ()  # it has no tools
    takes_calls = False

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self.num_steps = 0

    def reset(self, seed: int, row: Mapping[str, Any]) -> dict[str, Any]:
        accepted = _accepted(self.environment.reset, {"seed": seed, **row})
        result = awaited(self.environment.reset(**accepted))
        return _observed(result[0] if isinstance(result, tuple) and result else result, "reset")

    def step(self, text: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        self.num_steps += 1
        result = awaited(self.environment.step(text))
        if not (isinstance(result, tuple) and len(result) == 5):
            number = f" of {len(result)}" if isinstance(result, tuple) else ""
            raise EnvironmentFailed(
                f"step of {type(self.environment).__name__} returned {_kind(result)}{number} instead of "
                "(observation, reward, terminated, truncated, info)"
            )
        observation, reward, terminated, truncated, info = result
        correct = info.get("correct") if isinstance(info, Mapping) else None
        return {
            **_observed(observation, "step"),
            "reward": _number(reward, "step"),
            "done": bool(terminated) or bool(truncated),
            "correct": None if correct is None else bool(correct),
        }

    def finish(self) -> dict[str, Any]:
        """Its steps have paid already; an episode that ends before the first one has earned nothing."""
        return {} if self.num_steps else {"reward": 0.0}


class ToolEpisode:
    takes_calls = True

    def __init__(self, environment: Any, tools: Mapping[str, Any]) -> None:
        self.environment = environment
        self.own_tools = methods_of(environment)
        self.tools = {**tools, **self.own_tools}

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Of the environment's own tools; those of the run are described once for all problems."""
        return [tool_schema(tool) for tool in self.own_tools.values()]

    def reset(self, seed: int, row: Mapping[str, Any]) -> dict[str, Any]:
        accepted = _accepted(self.environment.reset, {"seed": seed, **row})
        return {"observation": _text(awaited(self.environment.reset(**accepted)), "reset")}

    def step(self, text: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """The results of the calls; without any, the policy has had its last word."""
        if not calls:
            return {"observation": "", "done": True}
        results = [self._call(call) for call in calls]
        return {
            "messages": [message for message, _ in results],
            "num_tool_calls": len(results),
            "num_tool_errors": sum(failed for _, failed in results),
        }

    def _call(self, call: dict[str, Any]) -> tuple[dict[str, str], bool]:
        """A tool's answer as a message, and whether it failed. What fails goes back to the model."""
        name, arguments = call.get("name"), call.get("arguments")
        message = {"role": "tool", "name": str(name or "")}
        if "error" in call:
            return {**message, "content": f"Error: {call['error']}."}, True
        if name not in self.tools:
            known = ", ".join(sorted(self.tools))
            return {**message, "content": f"Error: there is no tool {name}. There are: {known}."}, True
        try:
            result = awaited(self.tools[name](**(arguments if isinstance(arguments, dict) else {})))
        except ProgramRaised as error:
            return {**message, "content": str(error)}, True
        except ToolFailed as error:
            return {**message, "content": f"Error: {error}"}, True
        except Exception as error:
            return {**message, "content": f"Error: {type(error).__name__}: {error}"}, True
        return {**message, "content": _text(str(result), name)}, False

    def finish(self) -> dict[str, Any]:
        if not hasattr(self.environment, "get_reward"):
            return {}
        reward = _number(awaited(self.environment.get_reward()), "get_reward")
        correct = getattr(self.environment, "correct", None)
        return {"reward": reward, "correct": None if correct is None or callable(correct) else bool(correct)}


def open_problem(
    episode: GymEpisode | ToolEpisode, seed: int, row: Mapping[str, Any]
) -> tuple[str, list[dict[str, str]]]:
    """How a problem begins: the text behind its prompt, and the messages in place of it, if there are some.

    Runs in the run's own process, so global generators stay as they were.
    """
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    torch_state = None if torch is None else torch.get_rng_state()
    seed_generators(seed)
    try:
        answer = json_safe(episode.reset(seed, row))  # as the pool does for those of episodes
    finally:
        if isinstance(episode.environment, OpenEnvEnvironment):
            episode.environment.close()  # the server may have few sessions
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        if torch is not None:
            torch.set_rng_state(torch_state)
    return answer["observation"], answer.get("messages", [])


def seed_generators(seed: int) -> None:
    """Seed the global generators from which an environment or a tool may draw, as far as they are imported.

    Episodes are forks of one process, so that without it numpy and torch would draw the same in all of them.
    """
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % (1 << 32))
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(seed)


def close(environment: Any) -> None:
    """Call Gymnasium's `close`, where there is one. The reward is known: what `close` raises is ignored."""
    if callable(method := getattr(environment, "close", None)):
        with contextlib.suppress(Exception):
            awaited(method())


def snapshot(environment: Any) -> dict[str, Any]:
    """The public attributes of an environment that are plain data, for reward functions (`environments`)."""
    state: dict[str, Any] = {}
    size = 0
    for name, value in vars(environment).items() if hasattr(environment, "__dict__") else ():
        if name.startswith("_"):
            continue
        try:
            text = json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            continue
        if size + len(text) <= MAX_STATE:
            size += len(text)
            state[name] = json.loads(text)
    return state


def _accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `arguments` that the function takes."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(arguments)
    return {
        parameter.name: arguments[parameter.name] for parameter in parameters if parameter.name in arguments
    }


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
    )


def _observed(value: Any, source: str) -> dict[str, Any]:
    """A text, or messages: the whole prompt from `reset`, what the user says from `step`."""
    if not (isinstance(value, list) and value and all(map(_is_message, value))):
        return {"observation": _text(value, source)}
    if source == "step" and any(message["role"] not in ("user", "tool") for message in value):
        raise EnvironmentFailed("step returned messages of another role than user or tool")
    return {"observation": "", "messages": [dict(message) for message in value]}


def _text(value: Any, source: str) -> str:
    if source == "reset" and not (value is None or isinstance(value, str)):
        raise EnvironmentFailed(f"reset returned {_kind(value)}: return the first observation as a text")
    text = "" if value is None else str(value)
    if len(text) > MAX_TEXT:
        raise EnvironmentFailed(f"an observation of {len(text):,} characters")
    return text


def _number(value: Any, source: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise EnvironmentFailed(f"{source} returned {_kind(value)} as the reward") from None
    if not math.isfinite(number):
        raise EnvironmentFailed(f"{source} returned the reward {number}")
    return number


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
