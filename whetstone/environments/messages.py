"""Messages between a run and an episode's process: a length and JSON. Whatever else arrives is an error."""

import json
import struct
from typing import Any

MAX_MESSAGE = 4 << 20
_LENGTH = struct.Struct("<I")


class BadMessage(Exception):
    """The other side sent something that is no message."""


def pack(message: dict[str, Any]) -> bytes:
    data = json.dumps(message).encode()
    return _LENGTH.pack(len(data)) + data


def unpack(received: bytearray) -> dict[str, Any] | None:
    """Remove the first message of what was received; None while it is incomplete."""
    if len(received) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(received)
    if length > MAX_MESSAGE:
        raise BadMessage(f"a message of {length:,} bytes")
    end = _LENGTH.size + length
    if len(received) < end:
        return None
    data = bytes(received[_LENGTH.size : end])
    del received[:end]
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        raise BadMessage("no JSON") from None
    if not isinstance(message, dict):
        raise BadMessage("no JSON object")
    return message
