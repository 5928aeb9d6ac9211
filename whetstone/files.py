"""Atomic file writes, disk errors as one sentence, data that JSON, UTF-8 and tokenizers can hold."""

import contextlib
import errno
import math
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whetstone.errors import explained


def atomic_write(path: Path, content: str | bytes, *, many_writers: bool = False) -> None:
    """Write a whole file beside its place and rename it there: readers see the old or the new, never half."""
    data = content.encode(errors="replace") if isinstance(content, str) else content
    aside = path.with_name(f".{uuid.uuid4().hex if many_writers else path.name}.part")
    with explain_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)


def explain_disk_errors(path: Path) -> contextlib.AbstractContextManager[None]:
    """A disk that is full or may not be written is the user's to mend, in one sentence."""
    return explained(lambda error: _disk_error(error, path) if isinstance(error, OSError) else None)


def _disk_error(error: OSError, path: Path) -> str | None:
    reason = f"({os.strerror(error.errno)})" if error.errno else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"The disk is full, so {path} could not be written: free some space and start again "
            "with auto_resume=true."
        )
    if error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP):
        return (
            f"{path} can't be written, since {error.filename} is in the way {reason}: move it elsewhere and "
            "start again with auto_resume=true."
        )
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return f"{path} may not be written {reason}: choose another output_dir."
    return None


def valid_text(text: str) -> str:
    """Without lone surrogates, which arguments, terminals and JSON may hold, and no tokenizer takes."""
    return text.encode("utf-8", "replace").decode()


def num_levels(value: Any) -> int:
    """How many lists and objects are in each other: 0 for a plain value. Without recursion."""
    levels, entries = 0, [value]
    while containers := [entry for entry in entries if isinstance(entry, Mapping | list | tuple)]:
        levels += 1
        entries = [e for c in containers for e in (c.values() if isinstance(c, Mapping) else c)]
    return levels


def json_safe(value: Any, levels: int = 100) -> Any:
    """The same data with null for what JSON has no number for, "?" for half a character, and "..." for what
    is nested deeper than `levels`.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, Mapping | list | tuple) and not levels:
        return "..."
    if isinstance(value, Mapping):
        return {valid_text(str(key)): json_safe(entry, levels - 1) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(entry, levels - 1) for entry in value]
    return value
