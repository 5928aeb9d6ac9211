"""Reward functions of the user's own: found by `my_rewards.py:close_enough` or `package.module:function`,
called the way TRL calls them.

`f(prompts=, completions=, completion_ids=, **columns) -> list of float or None`, plain or async.
`trainer_state`, `log_extra` and `log_metric` are given where the function can take them. A function of one
answer, such as `f(generated_text, ground_truth)` or `f(output, ground_truth_ans, nums)` -> float or (float,
details), is called once for each. A file's own folder and the working directory can be imported from. Keeps
no time: the scoring pool does; `verify.py` tries the import before a run.
"""

import ast
import asyncio
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whetstone.errors import UserError, message_of

# What functions of one answer call its text, and the truth: the columns that are looked for, in this order.
_TEXTS = ("generated_text", "output", "response", "completion")
_TRUTHS = {"ground_truth": ("answer", "target"), "ground_truth_ans": ("target", "answer")}
LARGEST = 1e9  # a reward beyond it would overflow the arithmetic of advantages


class WrongReturn(ValueError):
    """A function that does not return one value for each completion: no retry can help."""


@dataclass(frozen=True)
class Logged:
    """What a reward function handed to `log_metric` and `log_extra`."""

    metrics: dict[str, float] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)


def check(spec: str) -> None:
    """Complain about a reward function that cannot be there, without running any of the user's code."""
    source, function = _split(spec)
    if not source.endswith(".py"):
        return  # a module: only importing it tells
    path = Path(source)
    if not path.is_file():
        raise UserError(
            f"reward_funcs names '{spec}', but there is no file {source} here: give its path relative to "
            f"{Path.cwd()}."
        )
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, RecursionError, MemoryError, OSError) as error:
        raise UserError(f"The reward file {source} is not readable as Python: {error}.") from None
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    imported = any(
        isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.ClassDef | ast.If | ast.Try)
        for node in tree.body
    )
    if function not in defined and not (imported and function in path.read_text(encoding="utf-8")):
        known = ", ".join(defined) or "none"
        raise UserError(f"The reward file {source} has no function '{function}': it defines {known}.")


def load(spec: str) -> Callable[..., Any]:
    """The function that `spec` names; runs the user's module."""
    source, name = _split(spec)
    module = _load_file(Path(source), spec) if source.endswith(".py") else _load_module(source, spec)
    if not hasattr(module, name):
        raise UserError(f"reward_funcs names '{spec}', but {source} has no function '{name}'.")
    function = getattr(module, name)
    if not callable(function):
        raise UserError(
            f"reward_funcs names '{spec}', but {name} is a {type(function).__name__}, not a function."
        )
    return function


def _split(spec: str) -> tuple[str, str]:
    source, colon, function = spec.rpartition(":")
    if not colon or not source or not function.isidentifier():
        raise UserError(
            f"The reward function '{spec}' is not understood: write accuracy, format, length or "
            "my_rewards.py:my_function."
        )
    return source, function


def _import_from(folder: Path, source: int | None = None) -> None:
    """Let modules of a folder be imported: before all others (`place` 0), or behind them."""
    entry = str(folder)
    if entry not in sys.path[:1] and source == 0:
        sys.path.insert(0, entry)
    elif entry not in sys.path:
        sys.path.append(entry)


def _load_file(path: Path, spec: str) -> Any:
    check(spec)
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    _import_from(Path.cwd(), source=0)  # the packages of the user's project
    _import_from(path.resolve().parent)  # and the file's neighbours; last, so that they shadow nothing
    sys.modules.setdefault(path.stem, module)
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:  # the user's own code, whatever it raises
        raise UserError(f"The reward file {path} could not be loaded: {_describe_error(error)}.") from error
    return module


def _load_module(name: str, spec: str) -> Any:
    _import_from(Path.cwd(), source=0)
    try:
        return importlib.import_module(name)
    except Exception as error:  # the user's own code, whatever it raises
        raise UserError(
            f"reward_funcs names '{spec}', but {name} could not be imported: {_describe_error(error)}."
        ) from error


def _describe_error(error: BaseException) -> str:
    """An error of the user's code in one line, with the line of their file where it came from."""
    text = " ".join(message_of(error).split())[:300].rstrip(".")
    trace, line = error.__traceback__, ""
    while trace is not None:
        source = trace.tb_frame.f_code.co_filename
        if "importlib" not in source and source != __file__:
            line = f" ({Path(source).name}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return f"{text}{line}"


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
        "log_metric": lambda name, value: logged.metrics.__setitem__(str(name), float(value)),
    }
    parameters = inspect.signature(function).parameters
    if text_parameter(parameters) is not None:
        return _checked(_call_each(function, arguments, parameters), count), logged
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    kwargs = {**offered, **arguments}
    if (
        not takes_all
    ):  # TRL would fail here with a TypeError; leaving out what was not asked for serves the same function
        kwargs = {name: value for name, value in kwargs.items() if name in parameters}
    values = function(**kwargs)
    if inspect.isawaitable(values):
        values = asyncio.run(_await(values))
    return _checked(values, count), logged


def text_parameter(parameters: Mapping[str, inspect.Parameter]) -> str | None:
    """The parameter that takes the text of one answer; None where the function takes whole lists, as TRL's
    do.
    """
    if {"completions", "prompts", "completion_ids"} & set(parameters):
        return None
    return next((name for name in _TEXTS if name in parameters), None)


def _call_each(
    function: Callable[..., Any], arguments: dict[str, Any], parameters: Mapping[str, inspect.Parameter]
) -> list[Any]:
    """The values of a function of one answer; of (value, details) the value."""
    values = []
    text_name = text_parameter(parameters)
    assert text_name is not None
    for source, completion in enumerate(arguments["completions"]):
        columns = {name: column[source] for name, column in arguments.items()}
        row = {name: value for name, value in columns.items() if name in parameters}
        for name, candidates in _TRUTHS.items():
            if name in parameters:
                row[name] = next(
                    (columns[entry] for entry in candidates if columns.get(entry) is not None), None
                )
        row[text_name] = completion if isinstance(completion, str) else completion[-1]["content"]
        value = function(**row)
        if inspect.isawaitable(value):
            value = asyncio.run(_await(value))
        values.append(value[0] if isinstance(value, tuple) and value else value)
    return values


async def _await(awaitable: Any) -> Any:
    return await awaitable


def _checked(values: Any, count: int) -> list[float | str | None]:
    if not isinstance(values, list | tuple) and hasattr(values, "tolist"):  # an array or a tensor
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise WrongReturn(
            f"returned a {type(values).__name__}, not a list with a number or None for each completion"
        )
    if len(values) != count:
        raise WrongReturn(f"returned {len(values)} values for {count} completions")
    return [None if value is None else _number(value) for value in values]


def _number(value: Any) -> float | str:
    """The value as a number, or why it is none."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return f"returned a {type(value).__name__} that is no number"
    if not math.isfinite(number) or abs(number) > LARGEST:
        return f"returned {number:g}, where at most {LARGEST:g} is allowed"
    return number
