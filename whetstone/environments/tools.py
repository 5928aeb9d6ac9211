"""Tools: their description for the chat template.

A description is the JSON schema that transformers makes of a function (`get_json_schema`), from its hints and
a docstring in Google's style; made here because that needs torch.
"""

import inspect
import re
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", dict: "object"}
_SECTION = re.compile(r"^\s*(Args|Returns|Raises|Yields|Example|Examples):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^\s*(\w+)(?:\s*\([^)]*\))?\s*:\s*(.*)$")


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The function as chat templates take it."""
    hints = get_type_hints(function)
    description, arguments, returns = _read_docstring(inspect.getdoc(function) or "")
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        properties[name] = _type_schema(hints.get(name, str))
        if name in arguments:
            properties[name]["description"] = arguments[name]
        if parameter.default is parameter.empty:
            required.append(name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    schema = {"name": function.__name__, "description": description, "parameters": parameters}
    if "return" in hints:
        schema["return"] = _type_schema(hints["return"]) | ({"description": returns} if returns else {})
    return {"type": "function", "function": schema}


def _read_docstring(text: str) -> tuple[str, dict[str, str], str]:
    """What stands before the first section, the entries of `Args`, and `Returns`."""
    sections = [(match.group(1), match.start(), match.end()) for match in _SECTION.finditer(text)]
    description = text[: sections[0][1] if sections else None].strip()
    arguments: dict[str, str] = {}
    returns = ""
    for number, (name, _, end) in enumerate(sections):
        stop = sections[number + 1][1] if number + 1 < len(sections) else None
        if name == "Returns":
            returns = text[end:stop].strip()
        elif name == "Args":
            current = ""
            for line in text[end:stop].splitlines():
                if match := _ARGUMENT.match(line):
                    current = match.group(1)
                    arguments[current] = match.group(2).strip()
                elif line.strip() and current:
                    arguments[current] += " " + line.strip()
    return description, arguments, returns


def _type_schema(hint: Any) -> dict[str, Any]:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if origin is Literal:
        kinds = list(dict.fromkeys(_NAMES.get(type(value), "string") for value in inner))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(inner)}
    if origin in (Union, types.UnionType):
        return _union_schema(inner)
    if origin is list:
        return {"type": "array", "items": _type_schema(inner[0])}
    if origin is tuple and Ellipsis not in inner:
        return {"type": "array", "prefixItems": [_type_schema(kind) for kind in inner]}
    if hint in (list, tuple) or origin is tuple:
        return {"type": "array"}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type_schema(inner[1])}
    return {"type": _NAMES.get(hint, "object")}


def _union_schema(hints: tuple[Any, ...]) -> dict[str, Any]:
    kinds = [_type_schema(hint) for hint in hints if hint is not type(None)]
    if len(kinds) == 1:
        schema = kinds[0]
    elif all(kind.keys() == {"type"} and isinstance(kind["type"], str) for kind in kinds):
        names = sorted({kind["type"] for kind in kinds})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": kinds}
    return {**schema, "nullable": True} if len(kinds) < len(hints) else schema
