"""The key `tools`: functions, or classes whose public methods are tools and keep state within an episode."""

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_type_hints

from whetstone.config.plugins import is_plugin, load_object, users_code
from whetstone.environments.builtin_tools import TOOLS, PythonTool
from whetstone.environments.tools import tool_schema
from whetstone.errors import UserError, did_you_mean

TOOLBOX = "tools"  # the environment of ordinary tasks that have tools
logger = logging.getLogger("whetstone")
_NOT_TOOLS = ("reset", "get_reward", "step", "close")


class Toolbox:
    """Nothing but tools: the task scores the policy's last turn."""

    def reset(self) -> None:
        return None


def load_tool(spec: str) -> Callable[..., Any]:
    """The function or class that an entry of `tools` names."""
    if is_plugin(spec):
        return load_object(spec, "tools")
    if spec not in TOOLS:
        raise UserError(
            f"tools names '{spec}'{did_you_mean(spec, TOOLS) or '.'} There are {', '.join(TOOLS)}; a tool of "
            "your own is my_tools.py:multiply."
        )
    return TOOLS[spec]


def make_tools(loaded: Iterable[Callable[..., Any]], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> tool of one episode. `settings` are those of the sandbox, for the tool that needs it."""
    tools: dict[str, Any] = {}
    for entry in loaded:
        if isinstance(entry, type):
            tools |= methods_of(entry(**settings) if issubclass(entry, PythonTool) else entry())
        else:
            tools[getattr(entry, "__name__", type(entry).__name__)] = entry
    return tools


def methods_of(owner: Any) -> dict[str, Any]:
    """The public methods of an object, which are its tools. Properties are not evaluated."""
    names = [name for name, _ in inspect.getmembers(type(owner), inspect.isroutine)]
    return {
        name: getattr(owner, name) for name in names if not name.startswith("_") and name not in _NOT_TOOLS
    }


def block_arguments(schemas: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Name of a tool -> the one argument that gets the text of a block of code."""
    arguments = {}
    for schema in schemas:
        function = schema["function"]
        names = list(function["parameters"]["properties"])
        required = function["parameters"].get("required", [])
        if not names or len(required) > 1:
            raise UserError(
                f"tool_call_format is code_block, but the tool {function['name']} does not take one text: "
                "give it one argument, or set tool_call_format=template."
            )
        arguments[function["name"]] = (required or names)[0]
    return arguments


def tool_schemas(specs: Sequence[str]) -> tuple[dict[str, Any], ...]:
    """What chat templates are told about the entries of `tools`; refuses what can't be described."""
    schemas: dict[str, dict[str, Any]] = {}
    for spec in specs:
        with users_code(f"tools names '{spec}', which can't be used"):
            tools = make_tools([load_tool(spec)], {})
            own = {name: tool_schema(tool) for name, tool in tools.items()}
        twice = next((name for name in own if name in schemas), None)
        if not own or twice is not None:
            reason = f"the tool {twice} twice" if own else f"'{spec}', a class without public methods"
            raise UserError(f"tools has {reason}: give every tool a name of its own.")
        for name, tool in tools.items():
            _note_gaps(name, tool, own[name]["function"])
        schemas |= own
    return tuple(schemas.values())


def _note_gaps(name: str, tool: Any, function: Mapping[str, Any]) -> None:
    """A warning where a tool lacks what the model is told about it."""
    hints = get_type_hints(tool) if inspect.isroutine(tool) else {}
    bare = [argument for argument in function["parameters"]["properties"] if argument not in hints]
    if bare or not function["description"]:
        what = f"type hint for {', '.join(bare)}" if bare else "docstring"
        logger.warning(f"The tool {name} has no {what}, so the model is told less about it: add it.")
