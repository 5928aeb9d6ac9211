"""Waits for an event instead of a fixed time. The time limit only ends a test that would hang."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], timeout_s: float = 60.0) -> T:
    """The first true value of the condition."""
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {timeout_s} s"
        time.sleep(0.01)
    return value
