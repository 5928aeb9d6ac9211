"""Tools: their description for the chat template, and the calls in what a model wrote.

A description is the JSON schema that transformers makes of a function (`get_json_schema`), from its hints and
a docstring in Google's style; made here because that needs torch. Calls are read in the formats of the chat
templates of Qwen and Hermes (`<tool_call>`), Llama 3 (a JSON object), Mistral (`[TOOL_CALLS]`) and gpt-oss,
outside of thoughts. What a model wrote is parsed as JSON, never evaluated; every pattern takes linear time.
"""

import inspect
import json
import re
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from whetstone.files import json_safe, num_levels, valid_text

MAX_CALLS = 32  # of one turn that are executed
MAX_LEVELS = 64  # of lists and objects in each other, in the arguments of a call
CALL_MARKERS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "to=functions.")
THOUGHTS = {
    "<think>": "</think>", "[THINK]": "[/THINK]", "<|START_THINKING|>": "<|END_THINKING|>"
}  # fmt: skip
_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", dict: "object"}
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_TAG = re.compile("|".join(map(re.escape, (*THOUGHTS, *THOUGHTS.values(), *CALL_MARKERS, "```"))))
_END_OF_BODY = re.compile(r"<\|(?:call|end|return|start|channel)\|>|\Z")
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")
_BLOCK = re.compile(r"^[ \t]*+```(\w++)[ \t]*+\n(.*?)(?:^[ \t]*+```|\Z)", re.DOTALL | re.MULTILINE)
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


def answer_start(text: str) -> int | None:
    """Where the answer begins behind the thoughts, the first of which the prompt may have opened; None where
    a thought has no end. A tag behind a call or in it opens nothing: it may be an argument.
    """
    start, is_thought, is_thinking, is_called = 0, False, False, False
    for match in _TAG.finditer(text):
        if match[0] in THOUGHTS:
            if not is_called:
                is_thought = is_thinking = True
        elif match[0] in THOUGHTS.values():
            if is_thinking or not is_thought:
                start, is_thought, is_thinking, is_called = match.end(), True, False, False
        elif not is_thinking:
            if is_thought:
                break
            is_called = True
    return None if is_thinking else start


def _answer(text: str) -> str:
    start = answer_start(text)
    return "" if start is None else text[start:]


def parse_calls(text: str) -> list[dict[str, Any]]:
    """The calls in a turn, each {"name", "arguments"}, or {"error"} where it can't be read."""
    if "<|channel|>" in text and "<|message|>" in text:  # its thoughts have a channel
        return _gpt_oss_calls(text)
    text = _answer(text)
    if "[TOOL_CALLS]" in text:
        return _mistral_calls(text.partition("[TOOL_CALLS]")[2].strip())
    if matches := _HERMES.findall(text):
        return [_json_call(part) for part in matches]
    bare = text.replace("<|python_tag|>", "").strip()
    bare = re.sub(r"<\|(eom_id|eot_id|im_end|end|endoftext|end_of_text)\|>$", "", bare).strip()
    if bare.startswith("{") and '"name"' in bare and ('"parameters"' in bare or '"arguments"' in bare):
        return [_json_call(part) for part in re.split(r"(?<=\})\s*+;\s*+(?=\{)", bare)]
    return []


def executed_calls(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first `MAX_CALLS`; an {"error"} tells the model of the others."""
    left = len(calls) - MAX_CALLS
    error = f"{left} more calls were not executed: write at most {MAX_CALLS} in one turn"
    return calls if left <= 0 else [*calls[:MAX_CALLS], {"error": error}]


def fenced_calls(text: str, tools: Iterable[Mapping[str, Any]], call_hint: str) -> list[dict[str, Any]]:
    """An {"error"} for each call in a code fence: models that write programs put them there, but no chat
    template asks for it, so a server would not find the call. `call_hint` says how to write it.
    """
    names = {tool["function"]["name"] for tool in tools}
    errors = []
    for block in _answer(text).split("```")[1::2]:
        call = _json_call(block.removeprefix("json")) if '"name"' in block else {}
        if call.get("name") in names and "error" not in call:
            errors.append({"error": f"the call of {call['name']} is in a code fence: {call_hint}"})
    return errors


def block_calls(text: str, arguments: Mapping[str, str]) -> list[dict[str, Any]]:
    """A call for each block of code whose language is a tool; `arguments`: tool -> what gets the code."""
    blocks = ((tool.lower(), code) for tool, code in _BLOCK.findall(_answer(text)))
    return [_call(name, {arguments[name]: code}) for name, code in blocks if name in arguments]


def _gpt_oss_calls(text: str) -> list[dict[str, Any]]:
    """Of messages whose header names a function, outside the analysis channel."""
    header, *parts = text.split("<|message|>")
    calls = []
    for part in parts:
        header = header.rpartition("<|start|>")[2]
        end = _END_OF_BODY.search(part)
        assert end is not None
        recipient = _RECIPIENT.search(header)
        if recipient is not None and "<|channel|>analysis" not in header:
            calls.append(_call(recipient[1], part[: end.start()]))
        header = part[end.start() :]
    return calls


def _mistral_calls(text: str) -> list[dict[str, Any]]:
    text = text.removesuffix("</s>").strip()
    if text.startswith("["):
        try:
            calls = json.loads(text)
        except (ValueError, RecursionError):
            return [{"error": "the tool calls are no JSON"}]
        return [_object_call(call) for call in calls]
    calls = []
    for part in filter(str.strip, text.split("[TOOL_CALLS]")):
        name, brace, arguments = part.partition("{")
        name = name.partition("[")[0].strip()  # in front of [CALL_ID] and [ARGS]
        is_call = brace and re.fullmatch(r"[\w.-]+", name)
        calls.append(
            _call(name, brace + arguments) if is_call else {"error": "the tool call has no arguments"}
        )
    return calls


def _json_call(text: str) -> dict[str, Any]:
    try:
        return _object_call(json.loads(text) if "{" in text else None)
    except (ValueError, RecursionError):
        return {"error": "the tool call is no JSON object"}


def _object_call(call: Any) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        return {"error": "the tool call is no JSON object"}
    if not isinstance(call.get("name"), str):
        return {"error": "the tool call has no name"}
    return _call(call["name"], call.get("arguments", call.get("parameters", {})))


def _call(name: str, arguments: Any) -> dict[str, Any]:
    """The door for what a model wrote: behind it files, templates and tokenizers can hold it."""
    name = valid_text(name)
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {"error": f"the arguments of {name} are no JSON"}
    if not isinstance(arguments, Mapping):
        return {"error": f"the arguments of {name} are no JSON object"}
    if num_levels(arguments) > MAX_LEVELS:
        return {"error": f"the arguments of {name} are nested deeper than {MAX_LEVELS} levels"}
    return {"name": name, "arguments": json_safe(arguments)}
