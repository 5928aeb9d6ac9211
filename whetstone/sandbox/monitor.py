"""Monitors a running program: output, wall clock, memory of all its processes. The zygote kills."""

import os
import resource
import select
import time

from whetstone.sandbox.layers import SandboxEnv
from whetstone.sandbox.program import Limits

_MEMORY_POLL_S = 0.05  # between two looks at the memory of all processes of a program
_CHUNK = 1 << 16
_FAST_EXIT_MS = 20


class PoolClosed(Exception):
    """The pool closed its end."""


class Monitor:
    """Reads what a program prints, and looks at its time and memory."""

    def __init__(self, env: SandboxEnv, zygote: int, channel: int, pipes: list[int], limits: Limits) -> None:
        """`zygote`: its process as /proc shows it. `channel`: to the pool."""
        self.outputs = [b"" for _ in pipes]
        self.timed_out = False
        self.exceeded_limit: str | None = None
        self._env, self._zygote, self._channel, self._pipes = env, zygote, channel, pipes
        self._max_memory = limits.memory_mb << 20
        self._max_output = [limits.output_kb << 10, limits.output_kb << 10, 1]
        for pipe in pipes:
            os.set_blocking(pipe, False)

    def wait_for_exit(self, exited: int, deadline: float) -> None:
        """Return when the program has ended, or must. `exited`: its process as a descriptor, closed here."""
        poll = select.poll()
        poll.register(exited, select.POLLIN)
        # Most are done at once. Until then only their end wakes us, and not each line that they print.
        if poll.poll(_FAST_EXIT_MS):
            os.close(exited)
            return
        for pipe in self._pipes:
            poll.register(pipe, select.POLLIN)
        poll.register(self._channel, 0)  # tells only that the other side has hung up
        next_check = time.monotonic() + _MEMORY_POLL_S
        try:
            while True:
                now = time.monotonic()
                if now >= deadline:
                    self.timed_out = True
                    return
                for pipe, event in poll.poll(max(1, int(1000 * (min(deadline, next_check) - now)) + 1)):
                    if pipe == exited:
                        return
                    if pipe == self._channel:
                        raise PoolClosed
                    if event & select.POLLIN:
                        self._read(self._pipes.index(pipe))
                    else:
                        poll.unregister(pipe)
                if self.exceeded_limit:
                    return
                if time.monotonic() >= next_check:
                    next_check = time.monotonic() + _MEMORY_POLL_S
                    processes = descendants(self._env, self._zygote) if self._env.has_proc else []
                    if sum(map(_memory_of, processes)) > self._max_memory:
                        self.exceeded_limit = "memory"
        finally:
            os.close(exited)

    def drain(self) -> None:
        """What is left in the pipes after the end."""
        for number in range(len(self._pipes)):
            while self._read(number):
                pass

    def _read(self, number: int) -> bool:
        try:
            piece = os.read(self._pipes[number], _CHUNK)
        except BlockingIOError:
            return False
        space = self._max_output[number] - len(self.outputs[number])
        self.outputs[number] += piece[:space]
        if len(piece) > space:
            self.exceeded_limit = self.exceeded_limit or "output"
            return False
        return bool(piece)


def _memory_of(process: int) -> int:
    try:
        with open(f"/proc/{process}/statm", "rb") as file:  # no codec, whose module may be out of reach
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return 0


def descendants(env: SandboxEnv, zygote: int) -> list[int]:
    """Every process that programs have started here, which all stem from the zygote."""
    processes = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    if env.restrictions.has_pid_namespace:
        return [process for process in processes if process != zygote]
    parents = {}
    for process in processes:
        try:
            with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
                parents[process] = int(file.read().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):  # it has ended
            continue
    result, pending = [], [zygote]
    while pending:
        ancestor = pending.pop()
        children = [process for process, parent in parents.items() if parent == ancestor]
        result += children
        pending += children
    return result
