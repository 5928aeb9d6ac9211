"""What the scoring pool knows of each answer of a batch."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from whetstone.tasks.scoring.process import ScoringRequest


class TaskResult(NamedTuple):
    """What a worker reported of an answer: built-in parts of its reward, and what the task read in it."""

    parts: dict[str, float]
    failure: str | None
    seconds: float | None = None  # None where the worker did not return
    answer: str | None = None
    outcome: str | None = None  # of a program
    tests: tuple[str, ...] = ()


@dataclass(kw_only=True, eq=False, slots=True)
class Pending:
    """An answer until its score is complete."""

    request: ScoringRequest
    same_as: "Pending | None" = None  # an equal answer to the same problem, whose result it gets
    result: TaskResult | None = None
    parts: dict[str, float] = field(default_factory=dict)  # with those of functions of the user's own
    extra: dict[str, Any] = field(default_factory=dict)  # column -> value, from `log_extra`
    failure: str | None = None
    is_alone: bool = False  # its job ended a worker: it gets a job of its own
    has_crashed: bool = False  # scoring it ended a worker: it is tried once more


class Batch:
    """The answers in order of submission."""

    def __init__(self) -> None:
        self.answers: list[Pending] = []
        self.failed: list[Pending] = []
        self.num_unscored = 0  # without a result, repeats left out
        self._first: dict[Hashable, Pending] = {}

    def add(self, request: ScoringRequest, key: Hashable) -> bool:
        """Whether it is the first answer with this `key`: others get its result."""
        pending = Pending(request=request, same_as=self._first.get(key))
        self.answers.append(pending)
        if pending.same_as is None:
            self._first[key] = pending
            self.num_unscored += 1
        return pending.same_as is None

    def record(self, pending: Pending, result: TaskResult) -> None:
        self.num_unscored -= pending.same_as is None and pending.result is None
        pending.result = result
        pending.parts.update(result.parts)
        if result.failure:
            self.fail(pending, result.failure)

    def fail(self, pending: Pending, reason: str) -> None:
        if pending.failure is None:
            self.failed.append(pending)
        pending.failure = reason
