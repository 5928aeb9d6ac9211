"""What was said in an evaluation's episode, as people read it."""

from collections.abc import Mapping, Sequence
from typing import Any

POLICY = "policy"


def conversation(turns: Sequence[Any] | None, completion: str) -> list[tuple[str, str]]:
    """(who, text) of each message; of one turn the completion alone. `turns` may come from a damaged file."""
    messages = [message for message in turns or () if isinstance(message, Mapping)]
    if len(messages) < 2:
        return [(POLICY, completion)]
    return [(_speaker(message), str(message.get("content", ""))) for message in messages]


def _speaker(message: Mapping[str, Any]) -> str:
    if message.get("role") == "assistant":
        return POLICY
    return f"tool {message.get('name', '')}".strip() if message.get("role") == "tool" else "environment"
