"""Processes that episodes have left behind.

An episode and the host are subreapers: what an episode starts stays beneath it while it lives, even daemons,
and belongs to the host afterwards. So a child of the host that is no episode is an orphan, and is ended.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Container

from whetstone.sandbox import cgroup, syscalls

PAUSE_S = 0.2  # without a request, before orphans are looked for
LONGEST_PAUSE_S = 2.0  # the same while requests come
MAX_ROUNDS = 100


def adopt_orphans() -> None:
    """Become the parent of what descendants leave behind."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)


def kill_group(child: int) -> None:
    """End a child and its group: a fork bomb in a group of its own ends at once."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            kill(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)


class Orphans:
    """Of the host: which episodes have ended since orphans were last looked for."""

    def __init__(self) -> None:
        self._ended: set[int] = set()
        self._since = 0.0

    def expect(self, episode: int) -> None:
        if not self._ended:
            self._since = time.monotonic()
        self._ended.add(episode)

    @property
    def pause_s(self) -> float | None:
        """How long to wait for a request; None: as long as it takes."""
        if not self._ended:
            return None
        return 0.0 if time.monotonic() - self._since > LONGEST_PAUSE_S else PAUSE_S

    def end_all(self, episodes: Container[int]) -> None:
        """Kill every child that is no episode; what those have started becomes a child in turn."""
        if not self._ended:
            return
        for _ in range(MAX_ROUNDS):
            orphans = [child for child in _children() if child not in episodes]
            if not orphans:
                break
            for orphan in orphans:
                kill_group(orphan)
        cgroup.remove_of(self._ended)
        self._ended.clear()


def _children() -> list[int]:
    """The children of this process."""
    own, children = os.getpid(), []
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdigit():
            with (
                contextlib.suppress(OSError, IndexError, ValueError),
                open(f"/proc/{name}/stat", "rb") as file,
            ):
                if int(file.read().rpartition(b")")[2].split()[1]) == own:
                    children.append(int(name))
    return children
