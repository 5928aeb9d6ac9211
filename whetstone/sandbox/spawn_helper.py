"""Compiles `spawn_helper.c` once per process that has a pool; supervisors get it as an open file.

Safety does not depend on it: without it supervisors fork and do the same in Python, at twice the cost.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from whetstone.sandbox import protocol

_SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "spawn_helper.c")
_COMPILERS = (  # the quickest result first: a static program needs no loader
    ("gcc", "-O2", "-w", "-static", "-s"),
    ("gcc", "-O2", "-w", "-s"),
    ("clang", "-O2", "-w", "-s"),
    ("tcc", "-w"),
)


@cache
def descriptor() -> int | None:
    """A file without a name that holds the built program; None where none can be built."""
    unable = contextlib.suppress(OSError, subprocess.TimeoutExpired)  # a full disk, a compiler that hangs
    with unable, tempfile.TemporaryDirectory(prefix="whet-") as folder:
        binary = os.path.join(folder, "start")
        for compiler, *options in _COMPILERS:
            path = shutil.which(compiler)
            if path is None or _output([path, *options, "-o", binary, _SOURCE]) is None:
                continue
            if _output([binary, folder, "-1", "0", "/bin/echo", "here"]) == b"here\n":
                file = os.memfd_create("start")
                protocol.write_all(file, Path(binary).read_bytes())
                return file
    return None


def _output(command: list[str]) -> bytes | None:
    """What a command prints; None where it fails or can't be started."""
    with contextlib.suppress(OSError):
        process = subprocess.run(command, capture_output=True, check=False, timeout=60)
        return process.stdout if process.returncode == 0 else None
    return None
