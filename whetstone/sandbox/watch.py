"""Watches a program while it runs, and ends it with everything that it has started.

Reads what it prints, looks at the clock and at the memory of all its processes. Afterwards nothing of it is
alive: in a process namespace one call ends all; elsewhere the keeper, to whom orphans come, kills until
there is none.
"""

import contextlib
import os
import resource
import select
import signal
import time
from typing import Any

from whetstone.sandbox.guard import Ceilings
from whetstone.sandbox.settle import Place

_WATCH_S = 0.05  # between two looks at the memory of all processes of a program
_CHUNK = 1 << 16
_AT_ONCE_MS = 20


class HungUp(Exception):
    """The pool is gone: so is the reason to go on."""


class Watch:
    """Reads what a program prints, and looks at its time and memory."""

    def __init__(
        self, place: Place, child: int, ends: list[int], ceilings: Ceilings, most_output: int
    ) -> None:
        self.texts = [b"" for _ in ends]
        self.timed_out = False
        self.too_much: str | None = None
        self.most_memory = 0
        self._place, self._child, self._ends = place, child, ends
        self._most_memory = ceilings.memory_mb << 20
        self._limits = [most_output, most_output, 1]
        for end in ends:
            os.set_blocking(end, False)

    def until_it_ends(self, deadline: float) -> None:
        """Return when the program has ended, or must."""
        exited = os.pidfd_open(self._child)
        poll = select.poll()
        poll.register(exited, select.POLLIN)
        # Most are done at once. Until then only their end wakes us, and not each line that they print.
        if poll.poll(_AT_ONCE_MS):
            os.close(exited)
            return
        for end in self._ends:
            poll.register(end, select.POLLIN)
        poll.register(self._place.channel, 0)  # tells only that the other side has hung up
        next_look = time.monotonic() + _WATCH_S
        try:
            while True:
                now = time.monotonic()
                if now >= deadline:
                    self.timed_out = True
                    return
                for end, event in poll.poll(max(1, int(1000 * (min(deadline, next_look) - now)) + 1)):
                    if end == exited:
                        return
                    if end == self._place.channel:
                        _kill(self._place)
                        raise HungUp
                    if event & select.POLLIN:
                        self._read(self._ends.index(end))
                    else:
                        poll.unregister(end)
                if self.too_much:
                    return
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + _WATCH_S
                    self._look_at_memory()
        finally:
            os.close(exited)

    def drain(self) -> None:
        """What is left in the pipes after the end."""
        for number in range(len(self._ends)):
            while self._read(number):
                pass

    def _read(self, number: int) -> bool:
        try:
            piece = os.read(self._ends[number], _CHUNK)
        except BlockingIOError:
            return False
        room = self._limits[number] - len(self.texts[number])
        self.texts[number] += piece[:room]
        if len(piece) > room:
            self.too_much = self.too_much or "output"
            return False
        return bool(piece)

    def _look_at_memory(self) -> None:
        memory = sum(_memory_of(process) for process in _descendants(self._place))
        self.most_memory = max(self.most_memory, memory)
        if memory > self._most_memory:
            self.too_much = "memory"


def _memory_of(process: int) -> int:
    try:
        with open(f"/proc/{process}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return 0


def _descendants(place: Place) -> list[int]:
    """Every process that programs have started here."""
    if not place.has_proc or not os.path.isdir("/proc/self"):
        return []
    us = os.getpid()
    processes = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    if place.walls.has_own_processes:
        return [process for process in processes if process != us]
    parents = {}
    for process in processes:
        try:
            with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
                parents[process] = int(file.read().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):  # it has ended
            continue
    found, waiting = [], [us]
    while waiting:
        above = waiting.pop()
        below = [process for process, parent in parents.items() if parent == above]
        found += below
        waiting += below
    return found


def end_all(place: Place, child: int) -> tuple[int, Any]:
    """Kill what is left, until there is nothing; the child's own status and usage."""
    own: tuple[int, Any] | None = None
    patience = time.monotonic() + 5
    ended = False
    while True:
        try:
            process, status, usage = os.wait4(-1, os.WNOHANG if not ended else 0)
        except ChildProcessError:
            break
        if process == child:
            own = (status, usage)
            continue
        if process:
            continue
        _kill(place)
        ended = place.walls.has_own_processes  # one call gets them all; then it is enough to wait
        if not ended:
            time.sleep(0.001)
            if time.monotonic() > patience:
                raise OSError(16, "processes that can't be ended")  # the pool replaces us
    assert own is not None
    return own


def _kill(place: Place) -> None:
    if place.walls.has_own_processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        return
    if place.walls.user is not None:  # nobody else has this user: -1 as that user reaches them all at once
        helper = os.fork()
        if helper == 0:
            try:
                os.setresuid(place.walls.user, place.walls.user, place.walls.user)
                os.kill(-1, signal.SIGKILL)
            finally:
                os._exit(0)
        return
    for process in _descendants(place):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
