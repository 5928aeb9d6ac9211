"""Messages and tools of a request, as chat templates take them."""

import json
from typing import Any

from whetstone.endpoint.protocol import ApiError
from whetstone.environments.calls import MAX_LEVELS
from whetstone.files import json_safe, num_levels, valid_text

ROLES = ("system", "developer", "user", "assistant", "tool")
KEYS = {"role", "content", "name", "tool_calls", "tool_call_id"}


def template_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with texts in place of parts, and the arguments of calls as objects."""
    converted = [_message(number, message) for number, message in enumerate(messages)]
    if converted[-1]["role"] == "assistant":
        raise _wrong("The conversation has no message to answer at its end: end it with a user's message.")
    return converted


def check_tools(tools: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    for number, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise ApiError(400, f"tools[{number}] is no function.", param="tools")
        if not isinstance(function.get("name"), str):
            raise ApiError(400, f"tools[{number}].function has no name.", param="tools")
    if num_levels(tools) > MAX_LEVELS:
        raise ApiError(400, f"tools are nested deeper than {MAX_LEVELS} levels.", param="tools")
    return tuple(json_safe(tools))


def _wrong(text: str) -> ApiError:
    return ApiError(400, text, param="messages")


def _message(number: int, message: dict[str, Any]) -> dict[str, Any]:
    where = f"messages[{number}]"
    role = message.get("role")
    if role not in ROLES:
        raise _wrong(f"{where}.role is not one of {', '.join(ROLES)}.")
    unknown = sorted(key for key, value in message.items() if key not in KEYS and value)
    if unknown:
        raise _wrong(f"{where}.{unknown[0][:100]} is not supported.")
    converted: dict[str, Any] = {"role": role, "content": _content(where, message.get("content"))}
    if message.get("tool_calls"):
        if role != "assistant":
            raise _wrong(f"{where}.tool_calls belongs to messages of the assistant.")
        converted["tool_calls"] = _calls(where, message["tool_calls"])
    elif message.get("content") is None:
        raise _wrong(f"{where}.content is missing.")
    for key in ("name", "tool_call_id"):
        if isinstance(message.get(key), str):
            converted[key] = valid_text(message[key])
    return converted


def _content(where: str, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return valid_text(content)
    if not isinstance(content, list):
        raise _wrong(f"{where}.content is neither a text nor a list of parts.")
    texts = []
    for part in content:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise _wrong(f"{where}.content has a part that is no text: this model reads text only.")
        texts.append(valid_text(part["text"]))
    return "".join(texts)


def _calls(where: str, calls: Any) -> list[dict[str, Any]]:
    converted = []
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        if call is None or not (isinstance(function, dict) and isinstance(function.get("name"), str)):
            raise _wrong(f"{where}.tool_calls holds something that is no call of a function.")
        arguments = function.get("arguments", "{}")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                raise _wrong(f"{where}.tool_calls has arguments that are no JSON.") from None
        if num_levels(arguments) > MAX_LEVELS:
            raise _wrong(f"{where}.tool_calls has arguments nested deeper than {MAX_LEVELS} levels.")
        converted.append(
            {
                "id": valid_text(str(call["id"])) if "id" in call else "",
                "type": "function",
                "function": {"name": valid_text(function["name"]), "arguments": json_safe(arguments)},
            }
        )
    return converted
