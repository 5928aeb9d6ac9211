"""Builds `spawn_helper.c`, once per process that has a pool: supervisors get it as a readable file.

Nothing here is needed for safety: where there is no C compiler, or what it built does not run, keepers fork
themselves and do the same steps in Python, at twice the cost.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from functools import cache

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
        built = os.path.join(folder, "start")
        for compiler, *options in _COMPILERS:
            path = shutil.which(compiler)
            if path is not None and _made([path, *options, "-o", built, _SOURCE]) and _works(built, folder):
                with open(built, "rb") as file:
                    return _hold(file.read())
    return None


def _made(command: list[str]) -> bool:
    done = subprocess.run(command, capture_output=True, check=False, timeout=60)
    return done.returncode == 0


def _works(built: str, folder: str) -> bool:
    with contextlib.suppress(OSError):
        asked = [built, folder, "-1", "0", "/bin/echo", "here"]
        return subprocess.run(asked, capture_output=True, check=False, timeout=60).stdout == b"here\n"
    return False


def _hold(content: bytes) -> int:
    held = os.memfd_create("start")
    while content:
        content = content[os.write(held, content) :]
    return held
