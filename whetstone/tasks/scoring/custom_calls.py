"""Calls of the user's reward functions in a batch: one per function, and one per answer where that fails."""

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from whetstone.config.plugins import is_plugin
from whetstone.errors import UserError
from whetstone.tasks.scoring.batch import Batch
from whetstone.tasks.scoring.process import Job

_BROKEN_AFTER = 3  # calls for one answer each that all hang or die: the function is broken, not an answer
logger = logging.getLogger(__name__)


class CustomCalls:
    """The calls that are not finished, and what the finished ones returned."""

    def __init__(self, funcs: Mapping[str, str], batch: Batch) -> None:
        """`funcs`: function -> name of its part. The answers of `batch` get its values and failures."""
        self._names = {spec: name for spec, name in funcs.items() if is_plugin(spec)}
        self._batch = batch
        self.jobs: deque[Job] = deque()  # not sent to a worker yet
        self.pending: set[tuple[str, tuple[int, ...]]] = set()
        self.metrics: dict[str, list[float]] = {}  # from `log_metric`, the values of all calls
        self._single_calls: dict[str, list[bool]] = {}  # function -> which calls for one answer succeeded

    def start(self, numbers: Sequence[int]) -> None:
        """Queue a call of every function for all answers."""
        for spec in self._names if numbers else ():
            self._call(spec, tuple(numbers))

    def _call(self, spec: str, numbers: tuple[int, ...]) -> None:
        self.pending.add((spec, numbers))
        self.jobs.append(Job("custom", numbers, spec))

    def on_result(self, job: Job, message: Mapping[str, Any]) -> None:
        """Take in what a worker replied to a call."""
        values = message["values"]
        if message["is_misuse"]:
            raise UserError(
                f"The reward function {job.spec} {message['failure']}: return a list with one number, or "
                "None, for each completion."
            )
        if values is None:
            self.on_failure(job, str(message["failure"]))
            return
        self.pending.remove((job.spec, job.numbers))
        if len(job.numbers) == 1:
            self._single_calls.setdefault(job.spec, []).append(True)
        name = self._names[job.spec]
        answers = [self._batch.answers[number] for number in job.numbers]
        for pending, value in zip(answers, values, strict=True):
            if isinstance(value, str):  # why it can't be used
                self._batch.fail(pending, f"{name} {value}")
            elif value is not None:
                pending.parts[name] = float(value)
        for metric, logged in message["metrics"].items():
            self.metrics.setdefault(metric, []).extend(map(float, logged))
        for column, entries in message["columns"].items():
            if len(entries) != len(job.numbers):
                logger.warning(
                    f"The reward function {job.spec} gave log_extra {len(entries)} values of '{column}' for "
                    f"{len(job.numbers)} completions: they are not written. Give one value for each "
                    "completion."
                )
                continue
            for pending, entry in zip(answers, entries, strict=True):
                pending.extra[column] = entry

    def on_failure(self, job: Job, failure: str) -> None:
        """Retry one answer at a time to find the one at fault; stop where each of the first hangs or dies."""
        self.pending.remove((job.spec, job.numbers))
        if len(job.numbers) > 1:
            for number in job.numbers:
                self._call(job.spec, (number,))
            return
        self._fail(job.numbers, failure)
        results = self._single_calls.setdefault(job.spec, [])
        results.append(False)
        is_slow = failure in ("timeout", "crash")
        if is_slow and len(results) >= _BROKEN_AFTER and not any(results):
            for other in [other for other in self.jobs if other.spec == job.spec]:
                self.jobs.remove(other)
                self.pending.remove((other.spec, other.numbers))
                self._fail(other.numbers, failure)

    def _fail(self, numbers: Iterable[int], failure: str) -> None:
        for number in numbers:
            self._batch.fail(self._batch.answers[number], failure)
