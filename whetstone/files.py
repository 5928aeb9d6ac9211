"""Atomic file writes, disk errors as one sentence, numbers that JSON can hold."""

import contextlib
import errno
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from whetstone.errors import UserError


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write a whole file beside its place and rename it there: readers see the old or the new, never half."""
    data = content.encode() if isinstance(content, str) else content
    aside = path.with_name(f".{path.name}.part")
    with explain_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)


@contextlib.contextmanager
def explain_disk_errors(path: Path) -> Iterator[None]:
    """A disk that is full or may not be written is the user's to mend, in one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"The disk is full, so {path} could not be written: free some space and start again "
                "with auto_resume=true."
            ) from None
        if error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP):
            raise UserError(
                f"{path} can't be written, since {error.filename} is in the way "
                f"({os.strerror(error.errno)}): move it elsewhere and start again with auto_resume=true."
            ) from None
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise UserError(
                f"{path} may not be written ({os.strerror(error.errno)}): choose another output_dir."
            ) from None
        raise


def json_safe(value: Any) -> Any:
    """The same data with null for what JSON has no number for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_safe(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(entry) for entry in value]
    return value
