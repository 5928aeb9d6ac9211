"""The scoring pool: answers in, scores out, in worker processes with a hard time limit per answer.

Work starts at `submit` and is collected, in the order of submission, by `gather`. A worker that hangs is
killed and one that dies is replaced: that costs the one answer its score, is counted in `failures`, and the
rest goes on. More failures than `max_reward_failure_share` allows stop the run with the reason. There is no
thread: `submit` and `gather` move things along.
"""

import math
import os
import select
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, NamedTuple

from whetstone.config import nearest
from whetstone.config.rooms import Config
from whetstone.errors import UserError
from whetstone.rewards import custom
from whetstone.rewards.combine import BUILT_IN, combine, part_names
from whetstone.stages import reach
from whetstone.tasks.child import Child
from whetstone.tasks.worker import split_of
from whetstone.types import Problem, Score

_MOST_WORKERS = 16
_LARGEST_CHUNK = 16  # answers sent to a worker at once: few enough that workers share the work evenly
_LONGEST_START_S = 120.0
_LONGEST_CALL_S = 300.0  # for a whole list of answers given to a function of the user's own
_MOST_FAILED_STARTS = 3
_LEAST_FAILURES = 3  # fewer never stop a run, whatever their share


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What is to be scored."""

    problem: Problem
    text: str
    completion_ids: Sequence[int]
    truncated: bool


@dataclass(frozen=True)
class _Job:
    kind: str  # "score": answers one by one; "custom": one of the user's functions on a list of answers
    numbers: tuple[int, ...]
    spec: str = ""


class _Taken(NamedTuple):
    """What a task said beside the numbers: what it took for the answer, and how a program fared."""

    answer: str | None = None
    outcome: str | None = None
    tests: tuple[str, ...] = ()


class _Worker:
    """A process, what it is doing, and since when."""

    def __init__(self, config: Config) -> None:
        self.child = Child("whetstone.tasks.worker:serve")
        self.child.connection.send(config)
        self.ready = False
        self.job: _Job | None = None
        self.waiting: deque[int] = (
            deque()
        )  # numbers of the job whose results have not come yet; the first is in work
        self.since = time.monotonic()
        self.limit_s = _LONGEST_START_S
        self._poll = (
            select.poll()
        )  # Connection.poll makes a new selector each time, which costs more than a score
        self._poll.register(self.child.connection.fileno(), select.POLLIN)

    def has_news(self) -> bool:
        """Whether there is something to read, be it only that the process has ended."""
        return bool(self._poll.poll(0))

    def give(self, job: _Job, limit_s: float, payload: Any) -> None:
        self.job, self.waiting, self.limit_s = job, deque(job.numbers), limit_s
        self.child.connection.send((job.kind, limit_s, payload))
        self.since = time.monotonic()

    @property
    def deadline(self) -> float:
        is_busy = self.job is not None or not self.ready
        return self.since + self.limit_s if is_busy else math.inf


class Scorer:
    """Scores answers in other processes. `failures` counts those of the last `gather` that could not be
    scored.
    """

    def __init__(self, config: Config) -> None:
        check_reward_funcs(config)
        self._config = config
        self._funcs = config.tasks.reward_funcs
        self._names = part_names(self._funcs)
        self._limit_s = config.tasks.reward_timeout_s
        self._worst: dict[tuple[str, str], float] = {}
        self._failed_starts = 0
        self.failures = 0
        self.custom_metrics: dict[
            str, float
        ] = {}  # what the user's functions gave to log_metric in the last gather
        self.custom_columns: dict[str, list[Any]] = {}  # and to log_extra
        self._workers = [_Worker(config) for _ in range(_num_workers(config))]
        self._finalizer = weakref.finalize(self, _close_all, self._workers)  # also at exit
        self._reset()

    def _reset(self) -> None:
        self._answers: list[Answer] = []
        self._unsent: deque[int] = deque()
        self._jobs: deque[_Job] = deque()
        self._parts: dict[int, dict[str, float]] = {}
        self._taken: dict[int, _Taken] = {}
        self._failed: dict[int, str] = {}
        self._suspects: set[int] = set()  # answers whose scoring ended a process once
        self._open_calls: dict[tuple[str, tuple[int, ...]], None] = {}

    def submit(self, answer: Answer) -> None:
        """Hand an answer over; it is worked on from now on."""
        self._unsent.append(len(self._answers))
        self._answers.append(answer)
        self._pump(0.0)

    def gather(self) -> list[Score]:
        """Wait for everything submitted since the last time: its scores in that order."""
        everything = tuple(range(len(self._answers)))
        for spec in self._funcs if everything else ():
            if spec not in BUILT_IN:
                self._call(spec, everything)
        self.custom_metrics, self.custom_columns = {}, {}
        try:
            while len(self._taken) < len(self._answers) or self._open_calls:
                self._pump(1.0)
                self._check_failures()
                reach(len(self._taken))
            self.failures = len(self._failed)
            return [self._finished(number) for number in everything]
        finally:
            self._restart_busy()  # only after an error: otherwise nobody is
            self._reset()

    def close(self) -> None:
        """End the processes. May be called twice."""
        self._finalizer()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _pump(self, patience_s: float) -> None:
        """Give work to idle workers, take in what has come, end those who are late."""
        assert self._finalizer.alive, "the scorer is closed"
        self._hand_out()
        deadline = min(worker.deadline for worker in self._workers)
        if patience_s:
            pause = min(patience_s, max(0.0, deadline - time.monotonic()) + 0.01)
            wait([worker.child.connection for worker in self._workers], pause)
        for place, worker in enumerate(self._workers):
            if worker.has_news():
                self._listen(place, worker)
            elif time.monotonic() > worker.deadline:
                self._replace(place, "timeout")
        self._hand_out()

    def _hand_out(self) -> None:
        for place, worker in enumerate(self._workers):
            if not worker.ready or worker.job is not None:
                continue
            job = self._next_job()
            if job is None:
                return
            self._give(place, worker, job)

    def _next_job(self) -> _Job | None:
        if self._unsent:
            fair = -(-len(self._unsent) // (2 * len(self._workers)))
            size = min(_LARGEST_CHUNK, max(1, fair))
            return _Job("score", tuple(self._unsent.popleft() for _ in range(min(size, len(self._unsent)))))
        return self._jobs.popleft() if self._jobs else None

    def _give(self, place: int, worker: _Worker, job: _Job) -> None:
        answers = [self._answers[number] for number in job.numbers]
        if job.kind == "score":
            limit_s = self._limit_s
            rows = zip(job.numbers, answers, strict=True)
            payload: Any = [(number, a.problem, a.text, len(a.completion_ids)) for number, a in rows]
        else:
            limit_s = min(self._limit_s * len(answers), max(self._limit_s, _LONGEST_CALL_S))
            payload = (job.spec, [(a.problem, a.text, tuple(a.completion_ids), a.truncated) for a in answers])
        try:
            worker.give(job, limit_s, payload)
        except OSError:  # it died while it was idle: nobody's answer is to blame
            worker.job = None
            self._put_back(job, job.numbers)
            self._replace(place, "crash")

    def _listen(self, place: int, worker: _Worker) -> None:
        """Read all that a worker has sent."""
        connection = worker.child.connection
        try:
            while worker.has_news():
                self._hear(worker, connection.recv())
                worker.since = time.monotonic()
        except (EOFError, OSError):
            self._replace(place, "crash")

    def _hear(self, worker: _Worker, message: tuple[Any, ...]) -> None:
        kind, *rest = message
        if kind == "refused":
            raise UserError(rest[0])
        if kind == "ready":
            worker.ready, self._worst, self._failed_starts = True, rest[0], 0
        elif kind == "scored":
            number, parts, taken, failure, seconds = rest
            assert worker.waiting.popleft() == number
            failure = failure or ("timeout" if seconds > self._limit_s else None)
            self._record(number, parts, _Taken(*taken), failure)
            if not worker.waiting:
                worker.job = None
        else:
            values, metrics, columns, failure, _ = rest
            job, worker.job = worker.job, None
            assert job is not None
            self._take_values(job, values, failure)
            self.custom_metrics.update(metrics)
            for name, entries in columns.items():
                self.custom_columns.setdefault(name, []).extend(entries)

    def _replace(self, place: int, failure: str) -> None:
        """End a worker that hangs or has died, blame the answer it was at, and let a new one do the rest."""
        worker = self._workers[place]
        worker.child.close()
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= _MOST_FAILED_STARTS:
                raise UserError(
                    "The processes that score answers end at once (exit code "
                    f"{worker.child.process.returncode}): "
                    "see what they printed above; most often memory is short, or a reward file ends the "
                    "process."
                )
        self._workers[place] = _Worker(self._config)
        if worker.job is None:
            return
        if worker.job.kind == "custom":
            self._take_values(worker.job, None, failure)
        else:
            suspect, *rest = worker.waiting
            if failure == "crash" and suspect not in self._suspects:
                self._suspects.add(suspect)  # the process may have been killed from outside: once more
                rest = [suspect, *rest]
            else:
                self._record(suspect, {}, _Taken(), failure)
            self._put_back(worker.job, tuple(rest))

    def _put_back(self, job: _Job, numbers: tuple[int, ...]) -> None:
        if job.kind == "score":
            self._unsent.extendleft(reversed(numbers))
        else:
            self._jobs.appendleft(job)

    def _record(self, number: int, parts: dict[str, float], taken: _Taken, failure: str | None) -> None:
        if failure:
            problem = self._answers[number].problem
            worst = self._worst.get((split_of(problem), problem.task), 0.0)
            parts = {"correct": 0.0, **({"accuracy": worst} if "accuracy" in self._funcs else {})}
            self._failed[number] = failure
        self._parts.setdefault(number, {}).update(parts)
        self._taken[number] = taken

    def _call(self, spec: str, numbers: tuple[int, ...]) -> None:
        self._open_calls[spec, numbers] = None
        self._jobs.append(_Job("custom", numbers, spec))

    def _take_values(self, job: _Job, values: list[float | None] | None, failure: str | None) -> None:
        del self._open_calls[job.spec, job.numbers]
        if values is None and len(job.numbers) > 1:  # somewhere in the list: one at a time finds the guilty
            for number in job.numbers:
                self._call(job.spec, (number,))
        elif values is None:
            self._failed.update(dict.fromkeys(job.numbers, failure or "crash"))
        else:
            name = self._names[self._funcs.index(job.spec)]
            for number, value in zip(job.numbers, values, strict=True):
                if value is not None:
                    self._parts.setdefault(number, {})[name] = value

    def _finished(self, number: int) -> Score:
        parts, failure = self._parts[number], self._failed.get(number)
        paid = {
            name: value for name, value in parts.items() if not failure or (name == "accuracy" and value < 0)
        }
        reward = combine(paid, self._names, self._config.tasks.reward_weights)
        ordered = {name: parts[name] for name in ("correct", *self._names) if name in parts}
        return Score(reward=reward, parts=ordered, failure=failure, **self._taken[number]._asdict())

    def _check_failures(self) -> None:
        count, total = len(self._failed), len(self._answers)
        if count < _LEAST_FAILURES or count <= self._config.tasks.max_reward_failure_share * total:
            return
        number, reason = next(iter(self._failed.items()))
        answer = self._answers[number]
        raise UserError(
            f"Scoring failed on {count} of {total} answers, more than max_reward_failure_share "
            f"({self._config.tasks.max_reward_failure_share:g}) allows. The first was {answer.problem.id} "
            f"with '{reason}', on the text "
            f"{answer.text[-200:]!r}: mend the reward, or raise reward_timeout_s ({self._limit_s:g} s) or "
            "that share."
        )

    def _restart_busy(self) -> None:
        for place, worker in enumerate(self._workers):
            if worker.job is not None:
                worker.child.close()
                self._workers[place] = _Worker(self._config)


def check_reward_funcs(config: Config) -> None:
    """Complain about reward functions that cannot be there or would do nothing, before any process is
    started.
    """
    buffer, longest = config.tasks.overlong_buffer_length, config.rollout.max_completion_length
    for name in config.tasks.reward_funcs:
        if config.tasks.reward_funcs.count(name) > 1:
            raise UserError(
                f"reward_funcs names '{name}' twice: name it once and give it a weight in reward_weights."
            )
        if name in BUILT_IN:
            continue
        if ":" not in name:
            hint = nearest(name, BUILT_IN) or ": write accuracy, format, length or my_rewards.py:my_function."
            raise UserError(f"There is no reward function '{name}'{hint}")
        custom.check(name)
    if "length" in config.tasks.reward_funcs and not 0 < buffer <= longest:
        raise UserError(
            "The length reward needs overlong_buffer_length between 1 and max_completion_length "
            f"({longest}), but it is {buffer}: "
            f"set it to {max(1, longest // 4)}, say."
        )


def _num_workers(config: Config) -> int:
    if config.tasks.reward_workers:
        return config.tasks.reward_workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # a launcher's: the ranks of a host share its cores
    return min(_MOST_WORKERS, max(1, cores // 2 // ranks))


def _close_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.child.close()
