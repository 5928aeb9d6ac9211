"""Messages between a pool and its supervisors: a length, then JSON. Nothing is ever unpickled."""

import json
import os
import struct
from typing import Any

LONGEST = 256 << 20


def encode(message: Any) -> bytes:
    return json.dumps(message).encode()


def send(descriptor: int, message: Any) -> None:
    """Write one message; blocks until the other side has taken it."""
    text = encode(message)
    write_all(descriptor, struct.pack("<I", len(text)) + text)


def receive(descriptor: int) -> Any:
    """Read one message; `EOFError` where the other side is gone."""
    (length,) = struct.unpack("<I", read_exactly(descriptor, 4))
    if length > LONGEST:
        raise EOFError(f"a message of {length} bytes")
    return json.loads(read_exactly(descriptor, length))


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def read_exactly(descriptor: int, count: int) -> bytes:
    pieces = []
    while count:
        piece = os.read(descriptor, min(count, 1 << 20))
        if not piece:
            raise EOFError("the other side is gone")
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)
