"""Watches a program while it runs: reads what it prints, looks at the clock and at the memory of all its
processes. Ends nothing: that is the zygote's part.
"""

import os
import resource
import select
import time
from dataclasses import dataclass

from whetstone.sandbox.layers import Place
from whetstone.sandbox.restrict import Ceilings

_WATCH_S = 0.05  # between two looks at the memory of all processes of a program
_CHUNK = 1 << 16
_AT_ONCE_MS = 20


@dataclass(frozen=True, kw_only=True)
class Host:
    """What a keeper knows of its surroundings."""

    place: Place
    channel: int  # to the pool
    zygote: int  # as /proc shows it


class HungUp(Exception):
    """The pool is gone: so is the reason to go on."""


class Watch:
    """Reads what a program prints, and looks at its time and memory."""

    def __init__(self, host: Host, ends: list[int], ceilings: Ceilings, most_output: int) -> None:
        self.texts = [b"" for _ in ends]
        self.timed_out = False
        self.too_much: str | None = None
        self.most_memory = 0
        self._host, self._ends = host, ends
        self._most_memory = ceilings.memory_mb << 20
        self._limits = [most_output, most_output, 1]
        for end in ends:
            os.set_blocking(end, False)

    def until_it_ends(self, exited: int, deadline: float) -> None:
        """Return when the program has ended, or must. `exited`: its process as a descriptor, closed here."""
        poll = select.poll()
        poll.register(exited, select.POLLIN)
        # Most are done at once. Until then only their end wakes us, and not each line that they print.
        if poll.poll(_AT_ONCE_MS):
            os.close(exited)
            return
        for end in self._ends:
            poll.register(end, select.POLLIN)
        poll.register(self._host.channel, 0)  # tells only that the other side has hung up
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
                    if end == self._host.channel:
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
        host = self._host
        processes = descendants(host.place, host.zygote) if host.place.has_proc else []
        memory = sum(_memory_of(process) for process in processes)
        self.most_memory = max(self.most_memory, memory)
        if memory > self._most_memory:
            self.too_much = "memory"


def _memory_of(process: int) -> int:
    try:
        with open(f"/proc/{process}/statm", "rb") as file:  # no codec, whose module may be out of reach
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return 0


def descendants(place: Place, zygote: int) -> list[int]:
    """Every process that programs have started here, which all stem from the zygote."""
    processes = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    if place.walls.has_own_processes:
        return [process for process in processes if process != zygote]
    parents = {}
    for process in processes:
        try:
            with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
                parents[process] = int(file.read().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):  # it has ended
            continue
    found, waiting = [], [zygote]
    while waiting:
        above = waiting.pop()
        below = [process for process, parent in parents.items() if parent == above]
        found += below
        waiting += below
    return found
