"""Episodes of tensor-parallel ranks. They decode the same tokens together, so their engines must get the same
requests at the same moment: the first rank has the environments, the others repeat what it took.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from whetstone.engines.base import Request
from whetstone.environments.pool import Answer
from whetstone.parallel.collectives import broadcast_in_tp
from whetstone.parallel.mesh import Ranks
from whetstone.rollout.episodes import EpisodeStream


class NoEnvironments(contextlib.AbstractContextManager["NoEnvironments"]):
    """The pool of a rank whose first rank has the environments."""

    num_due = 0

    def start(self, *_: Any) -> None: ...
    def step(self, *_: Any) -> None: ...
    def finish(self, number: int) -> None: ...
    def end(self, number: int) -> None: ...
    def end_all(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...

    def poll(self, timeout_s: float) -> list[Answer]:
        return []


class FirstStream(EpisodeStream):
    """Tells the other ranks which answers came, and how many requests they made."""

    def __init__(self, ranks: Ranks, *args: Any, **options: Any) -> None:
        self.ranks = ranks
        self._seen: list[Answer] = []
        super().__init__(*args, **options)

    def _process(self, answers: Iterable[Answer]) -> Iterator[Request]:
        answers = list(answers)
        self._seen += answers
        return super()._process(answers)

    def _take(self, *, wait: bool) -> list[Request]:
        requests = super()._take(wait=wait)
        broadcast_in_tp(self.ranks, (self._seen, len(requests)))
        self._seen = []
        return requests


class OtherStream(EpisodeStream):
    """Repeats what the first rank took."""

    def __init__(self, ranks: Ranks, *args: Any, **options: Any) -> None:
        self.ranks = ranks
        self._waiting: list[Request] = []
        super().__init__(*args, **options)

    def _take(self, *, wait: bool) -> list[Request]:
        nothing: tuple[list[Answer], int] = ([], 0)
        answers, count = broadcast_in_tp(self.ranks, nothing)
        self._waiting += self._process(answers)
        requests, self._waiting = self._waiting[:count], self._waiting[count:]
        return requests


def stream_of(ranks: Ranks, *args: Any, **options: Any) -> EpisodeStream:
    """The stream of this rank."""
    if ranks.tp_size == 1:
        return EpisodeStream(*args, **options)
    return (FirstStream if ranks.is_first_of_tp else OtherStream)(ranks, *args, **options)
