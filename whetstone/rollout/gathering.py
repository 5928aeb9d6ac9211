"""Requests that become ready one by one and go to the engine together, and how long it waits for them."""

import time
from collections.abc import Callable
from typing import Generic, TypeVar

from whetstone.engines.base import Request

# A prefill of one request costs as much as of many.
GATHER_S = 0.01

T = TypeVar("T")


class Gathering(Generic[T]):
    """What is ready, until nothing more is expected or the first has waited for `GATHER_S`."""

    def __init__(self) -> None:
        self._ready: list[T] = []
        self._since = 0.0

    def __bool__(self) -> bool:
        return bool(self._ready)

    def add(self, item: T) -> None:
        if not self._ready:
            self._since = time.monotonic()
        self._ready.append(item)

    def remove(self, is_unwanted: Callable[[T], bool]) -> None:
        self._ready = [item for item in self._ready if not is_unwanted(item)]

    def pause_s(self, longest: float) -> float:
        """How long its owner may wait for more, at most `longest`."""
        return min(longest, max(0.0, self._since + GATHER_S - time.monotonic())) if self._ready else longest

    def take(self, *, expects_more: bool) -> list[T]:
        """All of them, or none yet."""
        if expects_more and time.monotonic() < self._since + GATHER_S:
            return []
        ready, self._ready = self._ready, []
        return ready


class TimedStream:
    """A `RequestStream` that measures how long the engine has nothing to do."""

    idle_s = 0.0

    def take(self, *, wait: bool) -> list[Request]:
        started = time.monotonic()
        requests = self._take(wait=wait)
        if wait:  # an engine waits only if nothing is left to sample
            self.idle_s += time.monotonic() - started
        return requests

    def _take(self, *, wait: bool) -> list[Request]:
        raise NotImplementedError
