"""Tools: their description for the chat template, and the calls in what a model wrote.

A description is the JSON schema that transformers makes of a function (`get_json_schema`), from its hints and
a docstring in Google's style; made here because that needs torch. Calls are read in the formats of the chat
templates of Qwen and Hermes (`<tool_call>`), Llama 3 (a JSON object), Mistral (`[TOOL_CALLS]`) and gpt-oss.
What a model wrote is parsed as JSON, never evaluated.
"""

import inspect
import json
import re
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

MAX_CALLS = 32  # of one turn
_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", dict: "object"}
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_GPT_OSS = re.compile(r"to=functions\.([\w.-]+).*?<\|message\|>(.*?)(?:<\|call\|>|$)", re.DOTALL)
_MISTRAL = re.compile(r"\[TOOL_CALLS\]\s*(.*)", re.DOTALL)
_MISTRAL_NAMED = re.compile(r"([\w.-]+)\s*(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)
_BLOCK = re.compile(r"^[ \t]*```(\w+)[ \t]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
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


def parse_calls(text: str) -> list[dict[str, Any]]:
    """The calls in a turn, each {"name", "arguments"}, or {"error"} where it can't be read."""
    if matches := _GPT_OSS.findall(text):
        return [_call(name, arguments) for name, arguments in matches[:MAX_CALLS]]
    if match := _MISTRAL.search(text):
        return _mistral_calls(match.group(1).strip())
    if matches := _HERMES.findall(text):
        return [_json_call(part) for part in matches[:MAX_CALLS]]
    bare = text.replace("<|python_tag|>", "").strip()
    bare = re.sub(r"<\|(eom_id|eot_id|im_end|end|endoftext|end_of_text)\|>$", "", bare).strip()
    if bare.startswith("{") and '"name"' in bare:
        return [_json_call(part) for part in re.split(r"(?<=\})\s*;\s*(?=\{)", bare)[:MAX_CALLS]]
    return []


def fenced_calls(text: str, tools: Iterable[Mapping[str, Any]], call_hint: str) -> list[dict[str, Any]]:
    """An {"error"} for each call in a code fence: models that write programs put them there, but no chat
    template asks for it, so a server would not find the call. `call_hint` says how to write it.
    """
    names = {tool["function"]["name"] for tool in tools}
    errors = []
    for block in text.split("```")[1::2]:
        call = _json_call(block.removeprefix("json"))
        if call.get("name") in names and "error" not in call:
            errors.append({"error": f"the call of {call['name']} is in a code fence: {call_hint}"})
    return errors[:MAX_CALLS]


def block_calls(text: str, arguments: Mapping[str, str]) -> list[dict[str, Any]]:
    """A call for each block of code whose language is a tool; `arguments`: tool -> what gets the code."""
    blocks = ((tool.lower(), code) for tool, code in _BLOCK.findall(text))
    calls = [_call(name, {arguments[name]: code}) for name, code in blocks if name in arguments]
    return calls[:MAX_CALLS]


def _mistral_calls(text: str) -> list[dict[str, Any]]:
    text = text.removesuffix("</s>").strip()
    if text.startswith("["):
        try:
            calls = json.loads(text)
        except (ValueError, RecursionError):
            return [{"error": "the tool calls are no JSON"}]
        return [_object_call(call) for call in calls[:MAX_CALLS]]
    parts = [part for part in text.split("[TOOL_CALLS]") if part.strip()]
    named = [_MISTRAL_NAMED.match(part.strip()) for part in parts[:MAX_CALLS]]
    return [
        {"error": "the tool call has no arguments"}
        if match is None
        else _call(match.group(1), match.group(2))
        for match in named
    ]


def _json_call(text: str) -> dict[str, Any]:
    try:
        return _object_call(json.loads(text))
    except (ValueError, RecursionError):
        return {"error": "the tool call is no JSON object"}


def _object_call(call: Any) -> dict[str, Any]:
    if not (isinstance(call, Mapping) and isinstance(call.get("name"), str)):
        return {"error": "the tool call has no name"}
    return _call(call["name"], call.get("arguments", call.get("parameters", {})))


def _call(name: str, arguments: Any) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {"error": f"the arguments of {name} are no JSON"}
    if not isinstance(arguments, Mapping):
        return {"error": f"the arguments of {name} are no JSON object"}
    return {"name": name, "arguments": dict(arguments)}
