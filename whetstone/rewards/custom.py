"""Reward functions of the user's own (`my_rewards.py:close_enough`), called as TRL calls them.

`f(prompts=, completions=, completion_ids=, **columns) -> list of float or None`, plain or async. Episodes add
`environments`; `trainer_state`, `log_extra` and `log_metric` are passed where the function takes them. A
function of one answer, such as `f(generated_text, ground_truth)` -> float or (float, details), is called once
per answer.
The scoring pool has the time limit; `verify.py` tries the import before a run.
"""

import inspect
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from whetstone.config.plugins import awaited, load_object

# What functions of one answer call its text, and the truth: the columns that are looked for, in this order.
LISTS = {"completions", "prompts", "completion_ids"}
_TEXTS = ("generated_text", "solution_str", "output", "response", "completion")
_TRUTHS = {"ground_truth": ("answer", "target"), "ground_truth_ans": ("target", "answer")}
LARGEST = 1e9  # a reward beyond it would overflow the arithmetic of advantages


class WrongReturn(ValueError):
    """A function that does not return one value for each completion: no retry can help."""


@dataclass(frozen=True)
class Logged:
    """What a reward function handed to `log_metric` and `log_extra`."""

    metrics: dict[str, list[float]] = field(default_factory=dict)  # each value; their mean is shown
    columns: dict[str, list[Any]] = field(default_factory=dict)


class EnvironmentState:
    """What TRL hands to reward functions as an environment: here its public attributes that are plain data.

    The environment itself has ended with its process. Of one that failed every attribute is None.
    """

    def __init__(self, state: Mapping[str, Any] | None) -> None:
        self.__dict__.update(state or {})
        self.__dict__["_has_failed"] = state is None

    def __getattr__(self, name: str) -> Any:
        if self.__dict__.get("_has_failed") and not name.startswith("__"):
            return None
        raise AttributeError(
            f"the environment had no attribute '{name}' of plain data when it ended; it has "
            f"{', '.join(key for key in vars(self) if key != '_has_failed') or 'none'}"
        )


def load(spec: str) -> Callable[..., Any]:
    """The function that `spec` names; runs the user's module."""
    return load_object(spec, "reward_funcs")


def conversational(completion: str) -> list[dict[str, str]]:
    """A completion as TRL gives it where the prompt is a list of messages."""
    return [{"role": "assistant", "content": completion}]


def call(
    function: Callable[..., Any], arguments: dict[str, Any], count: int
) -> tuple[list[float | str | None], Logged]:
    """Call a reward function on `count` answers: a number or None for each, or a text that says why its value
    can't be used. `WrongReturn` where there is not one value for each.
    """
    logged = Logged()
    offered = {
        "trainer_state": None,
        "log_extra": lambda column, values: logged.columns.setdefault(str(column), []).extend(values),
        "log_metric": lambda name, value: logged.metrics.setdefault(str(name), []).append(float(value)),
    }
    parameters = inspect.signature(function).parameters
    text_name = text_parameter(parameters)
    if text_name is not None:
        return _checked(_call_each(function, arguments, parameters, text_name), count), logged
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    kwargs = {**offered, **arguments}
    # TRL raises a TypeError for a parameter that is not taken; such a parameter is left out here.
    if not takes_all:
        kwargs = {name: value for name, value in kwargs.items() if name in parameters}
    return _checked(awaited(function(**kwargs)), count), logged


def text_parameter(parameters: Mapping[str, inspect.Parameter]) -> str | None:
    """The parameter that takes the text of one answer; None where the function takes whole lists."""
    if LISTS & set(parameters):
        return None
    return next((name for name in _TEXTS if name in parameters), None)


def _call_each(
    function: Callable[..., Any], arguments: dict[str, Any], parameters: Container[str], text_name: str
) -> list[Any]:
    """The values of a function of one answer; of (value, details) the value."""
    values = []
    for index, completion in enumerate(arguments["completions"]):
        columns = {name: column[index] for name, column in arguments.items()}
        row = {name: value for name, value in columns.items() if name in parameters}
        for name, candidates in _TRUTHS.items():
            if name in parameters:
                truths = (columns.get(candidate) for candidate in candidates)
                row[name] = next((truth for truth in truths if truth is not None), None)
        row[text_name] = completion if isinstance(completion, str) else _last_text(completion)
        value = awaited(function(**row))
        values.append(value[0] if isinstance(value, tuple) and value else value)
    return values


def _last_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """What the assistant said last: an environment may have answered it."""
    said = [message["content"] for message in messages if message.get("role", "assistant") == "assistant"]
    return said[-1] if said else ""


def _checked(values: Any, count: int) -> list[float | str | None]:
    if not isinstance(values, list | tuple) and hasattr(values, "tolist"):  # an array or a tensor
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise WrongReturn(f"returned {type(values).__name__}, not a list with one value per completion")
    if len(values) != count:
        raise WrongReturn(f"returned {len(values)} values for {count} completions")
    return [None if value is None else _number(value) for value in values]


def _number(value: Any) -> float | str:
    """The value as a number, or why it is none."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return f"returned {type(value).__name__}, not a number"
    if not math.isfinite(number):
        return f"returned {number:g}, not a finite number"
    if abs(number) > LARGEST:
        return f"returned {number:g}, where at most {LARGEST:g} is allowed"
    return number
