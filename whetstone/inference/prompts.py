"""Prompts: a question, a conversation or token ids. No torch: they are checked before a model is loaded."""

from collections.abc import Mapping, Sequence
from typing import Any

from whetstone.errors import UserError
from whetstone.files import valid_text

Message = Mapping[str, str]  # {"role": "user", "content": "..."}
Prompt = str | Sequence[Message] | Sequence[int]


def check_messages(prompt: Sequence[Any]) -> list[dict[str, str]]:
    """A conversation that ends with the message to answer."""
    for message in prompt:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise UserError(
                f"A prompt holds {str(message)[:80]!r}, which is no message: give a text, or a list of "
                '{"role": "user", "content": "..."}.'
            )
    if not prompt or prompt[-1]["role"] == "assistant":
        raise UserError("The conversation has no message to answer at its end: end it with a user's message.")
    return [{"role": message["role"], "content": valid_text(message["content"])} for message in prompt]
