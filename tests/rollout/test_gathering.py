"""Requests that are gathered for the engine, and the seconds that it waits for them."""

import pytest

from whetstone.engines.base import Request
from whetstone.rollout import gathering
from whetstone.rollout.gathering import GATHER_S, Gathering, TimedStream


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(gathering, "time", clock)
    return clock


def test_ready_items_are_taken_when_complete_or_late(clock):
    ready = Gathering[str]()
    assert not ready and ready.pause_s(0.5) == 0.5 and ready.take(expects_more=False) == []
    ready.add("a")
    clock.now += GATHER_S / 2
    ready.add("b")  # does not begin the time again
    assert ready.pause_s(0.5) == pytest.approx(GATHER_S / 2) and ready.pause_s(0.0) == 0.0
    assert ready.take(expects_more=True) == [] and ready
    clock.now += GATHER_S
    assert ready.pause_s(0.5) == 0.0
    assert ready.take(expects_more=True) == ["a", "b"] and not ready
    ready.add("c")
    ready.add("d")
    ready.remove(lambda item: item == "c")
    assert ready.take(expects_more=False) == ["d"]


def test_an_engine_is_idle_only_while_it_waits(clock):
    class Stream(TimedStream):
        def _take(self, *, wait: bool) -> list[Request]:
            clock.now += 2.0
            return []

    stream = Stream()
    stream.take(wait=True)
    stream.take(wait=False)
    stream.take(wait=True)
    assert stream.idle_s == 4.0
