"""The scoring pool: answers in, scores out, in worker processes with a hard time limit per answer.

Work starts at `submit` and is collected, in the order of submission, by `gather`. Text is judged in isolated
processes; programs and the user's own functions have processes of their own (`worker.py`). A process that
hangs is killed and one that dies is replaced: that costs the one answer its score, is counted in `failures`,
and the rest goes on. More failures than `max_reward_failure_fraction` allows stop the run with the reason.
There is no thread: `submit` and `gather` move things along.
"""

import math
import os
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, NamedTuple

from whetstone.config.sections import Config
from whetstone.errors import UserError, did_you_mean
from whetstone.rewards import custom
from whetstone.rewards.combine import BUILT_IN, combine, part_names
from whetstone.tasks.mixture import runs_programs
from whetstone.tasks.scoring.process import Job, ScoringProcess
from whetstone.tasks.scoring.worker import split_of
from whetstone.terminal.stages import reach
from whetstone.types import Problem, Score

_MOST_WORKERS = 16
_LARGEST_CHUNK = 16  # answers sent to a worker at once: few enough that workers share the work evenly
_LONGEST_CALL_S = 300.0  # for a whole list of answers given to a function of the user's own
_MOST_FAILED_STARTS = 3
_LEAST_FAILURES = 3  # fewer never stop a run, whatever their share
_WINDOW = 10  # gathers whose failures are judged together, so that small steps can't hide them
_BROKEN_AFTER = 3  # calls for one answer each that all hang or die: the function is broken, not an answer


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What is to be scored."""

    problem: Problem
    text: str
    completion_ids: Sequence[int]
    truncated: bool


class _Taken(NamedTuple):
    """What a task said beside the numbers: what it took for the answer, and how a program fared."""

    answer: str | None = None
    outcome: str | None = None
    tests: tuple[str, ...] = ()


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
        self._recent: deque[tuple[int, int]] = deque(maxlen=_WINDOW)  # (failures, answers) of recent gathers
        self.custom_metrics: dict[
            str, float
        ] = {}  # what the user's functions gave to log_metric in the last gather
        self.custom_columns: dict[str, list[Any]] = {}  # and to log_extra
        self._workers = [
            ScoringProcess(config, isolated=isolated)
            for isolated in _kinds_of_workers(config)
            for _ in range(_num_workers(config))
        ]
        self._finalizer = weakref.finalize(self, _close_all, self._workers)  # also at exit
        self._round = 0  # of submissions: results of an earlier one that was given up are of no interest
        self._reset()

    def _reset(self) -> None:
        self._round += 1
        self._answers: list[Answer] = []
        self._unsent: dict[bool, deque[int]] = {
            True: deque(),
            False: deque(),
        }  # for isolated processes, for others
        self._jobs: deque[Job] = deque()
        self._parts: dict[int, dict[str, float]] = {}
        self._taken: dict[int, _Taken] = {}
        self._failed: dict[int, str] = {}
        self._suspects: set[int] = set()  # answers whose scoring ended a process once
        self._open_calls: dict[tuple[str, tuple[int, ...]], None] = {}
        self._single_calls: dict[
            str, list[bool]
        ] = {}  # which calls for one answer each went well, by function

    def submit(self, answer: Answer) -> None:
        """Hand an answer over; it is worked on from now on."""
        self._unsent[not runs_programs(answer.problem.task)].append(len(self._answers))
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
            self._fail_without_reward()
            self._check_failures()
            self.failures = len(self._failed)
            self._recent.append((self.failures, len(everything)))
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
            try:
                for message in worker.messages():
                    self._hear(worker, message)
            except UserError:
                raise
            except (EOFError, OSError, KeyError, TypeError, ValueError):  # ended, or sent what is no message
                self._replace(place, "crash")
                continue
            if time.monotonic() > worker.deadline:
                self._replace(place, "timeout")
        self._hand_out()

    def _hand_out(self) -> None:
        for place, worker in enumerate(self._workers):
            if worker.ready and worker.job is None and (job := self._next_job(worker)) is not None:
                self._give(place, worker, job)

    def _next_job(self, worker: ScoringProcess) -> Job | None:
        unsent = self._unsent[worker.isolated]
        if unsent:
            colleagues = sum(other.isolated == worker.isolated for other in self._workers)
            size = min(_LARGEST_CHUNK, len(unsent), max(1, -(-len(unsent) // (2 * colleagues))))
            return Job("score", tuple(unsent.popleft() for _ in range(size)))
        return self._jobs.popleft() if self._jobs and not worker.isolated else None

    def _give(self, place: int, worker: ScoringProcess, job: Job) -> None:
        answers = [self._answers[number] for number in job.numbers]
        if job.kind == "score":
            limit_s = self._limit_s
            rows = zip(job.numbers, answers, strict=True)
            payload: Any = [(number, a.problem, a.text, len(a.completion_ids)) for number, a in rows]
        else:
            limit_s = min(self._limit_s * len(answers), max(self._limit_s, _LONGEST_CALL_S))
            payload = (job.spec, [(a.problem, a.text, tuple(a.completion_ids), a.truncated) for a in answers])
        try:
            worker.give(job, limit_s, payload, self._round)
        except OSError:  # it died while it was idle: nobody's answer is to blame
            worker.job = None
            self._put_back(job, job.numbers, worker.isolated)
            self._replace(place, "crash")

    def _hear(self, worker: ScoringProcess, message: Mapping[str, Any]) -> None:
        kind = message["kind"]
        if kind == "refused":
            raise UserError(message["reason"])
        if kind == "not_isolated":
            raise UserError(
                f"The processes that score answers could not be isolated ({message['reason']}): set "
                "sandbox_isolation=filters, or accept the risk with sandbox_isolation=limits."
            )
        if kind == "ready":
            worker.ready, self._failed_starts = True, 0
            self._worst = {(split, name): float(value) for split, name, value in message["worst"]}
        elif kind == "scored":
            number = message["number"]
            if worker.waiting.popleft() != number:
                raise ValueError("a result for another answer")
            parts = {str(name): float(value) for name, value in message["parts"].items()}
            failure = message["failure"] or ("timeout" if message["seconds"] > self._limit_s else None)
            if not all(math.isfinite(value) for value in parts.values()):
                failure = failure or "error: a score that is not finite"
            taken = _Taken(message["answer"], message["outcome"], tuple(message["tests"]))
            if worker.round == self._round:
                self._record(number, parts, taken, failure)
            if not worker.waiting:
                worker.job = None
        else:
            job, worker.job = worker.job, None
            if job is None or job.kind != "custom":
                raise ValueError("a result that nobody asked for")
            if worker.round == self._round:
                self._take_call(job, message)

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
        self._workers[place] = ScoringProcess(self._config, isolated=worker.isolated)
        if worker.job is None or worker.round != self._round:
            return
        if worker.job.kind == "custom":
            self._take_failed_call(worker.job, failure)
        else:
            suspect, *rest = worker.waiting
            if failure == "crash" and suspect not in self._suspects:
                self._suspects.add(suspect)  # the process may have been killed from outside: once more
                rest = [suspect, *rest]
            else:
                self._record(suspect, {}, _Taken(), failure)
            self._put_back(worker.job, tuple(rest), worker.isolated)

    def _put_back(self, job: Job, numbers: tuple[int, ...], isolated: bool) -> None:
        if job.kind == "score":
            self._unsent[isolated].extendleft(reversed(numbers))
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

    # ---- functions of the user's own -----------------------------------------------------------------------

    def _call(self, spec: str, numbers: tuple[int, ...]) -> None:
        self._open_calls[spec, numbers] = None
        self._jobs.append(Job("custom", numbers, spec))

    def _take_call(self, job: Job, message: Mapping[str, Any]) -> None:
        values = message["values"]
        if message["is_misuse"]:
            raise UserError(
                f"The reward function {job.spec} {message['failure']}: return a list with one number, or "
                "None, for each completion."
            )
        if values is None:
            self._take_failed_call(job, str(message["failure"]))
            return
        del self._open_calls[job.spec, job.numbers]
        if len(job.numbers) == 1:
            self._single_calls.setdefault(job.spec, []).append(True)
        name = self._names[self._funcs.index(job.spec)]
        for number, value in zip(job.numbers, values, strict=True):
            if isinstance(value, str):  # why it can't be used
                self._failed[number] = f"{name} {value}"
            elif value is not None:
                self._parts.setdefault(number, {})[name] = float(value)
        self.custom_metrics.update(message["metrics"])
        for column, entries in message["columns"].items():
            self.custom_columns.setdefault(column, []).extend(entries)

    def _take_failed_call(self, job: Job, failure: str) -> None:
        """One answer at a time finds the guilty. Where each of the first ends its process or takes all of its
        time, the others are not tried.
        """
        del self._open_calls[job.spec, job.numbers]
        if len(job.numbers) > 1:
            for number in job.numbers:
                self._call(job.spec, (number,))
            return
        self._failed.update(dict.fromkeys(job.numbers, failure))
        tried = self._single_calls.setdefault(job.spec, [])
        tried.append(False)
        is_slow = failure in ("timeout", "crash")
        if is_slow and len(tried) >= _BROKEN_AFTER and not any(tried):
            for other in [other for other in self._jobs if other.spec == job.spec]:
                self._jobs.remove(other)
                del self._open_calls[other.spec, other.numbers]
                self._failed.update(dict.fromkeys(other.numbers, failure))

    def _fail_without_reward(self) -> None:
        """An answer for which no function has a number would be trained on as if it were worth 0."""
        for number, parts in self._parts.items():
            if number not in self._failed and not any(name in parts for name in self._names):
                self._failed[number] = "no reward function returned a number"

    def _finished(self, number: int) -> Score:
        parts, failure = self._parts[number], self._failed.get(number)
        paid = {
            name: value for name, value in parts.items() if not failure or (name == "accuracy" and value < 0)
        }
        reward = combine(paid, self._names, self._config.tasks.reward_weights)
        ordered = {name: parts[name] for name in ("correct", *self._names) if name in parts}
        return Score(reward=reward, parts=ordered, failure=failure, **self._taken[number]._asdict())

    def _check_failures(self) -> None:
        if not self._failed:
            return
        count = len(self._failed) + sum(failures for failures, _ in self._recent)
        total = len(self._answers) + sum(answers for _, answers in self._recent)
        now, share = len(self._failed), self._config.tasks.max_reward_failure_fraction
        is_many_now = now >= _LEAST_FAILURES and now > share * len(self._answers)
        if not is_many_now and (count < _LEAST_FAILURES or count <= share * total):
            return
        if is_many_now:
            count, total = now, len(self._answers)
        number, reason = next(iter(self._failed.items()))
        answer = self._answers[number]
        raise UserError(
            f"Scoring failed on {count} of {total} answers, more than max_reward_failure_fraction "
            f"({share:g}) allows. The first was {answer.problem.id} "
            f"with '{reason}', on the text "
            f"{answer.text[-200:]!r}: mend the reward, or raise reward_timeout_s ({self._limit_s:g} s) or "
            "that share."
        )

    def _restart_busy(self) -> None:
        for place, worker in enumerate(self._workers):
            if worker.job is not None:
                worker.child.close()
                self._workers[place] = ScoringProcess(self._config, isolated=worker.isolated)


def _kinds_of_workers(config: Config) -> list[bool]:
    """Which kinds of processes a configuration needs: isolated ones (True), others (False)."""
    names = [*config.tasks.datasets, *(config.tasks.eval_datasets or {})]
    has_text = not names or any(not runs_programs(name) for name in names)
    has_own = any(name not in BUILT_IN for name in config.tasks.reward_funcs)
    has_programs = any(runs_programs(name) for name in names)
    return [True] * has_text + [False] * (has_programs or has_own)


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
            hint = (
                did_you_mean(name, BUILT_IN)
                or ": write accuracy, format, length or my_rewards.py:my_function."
            )
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


def _close_all(workers: list[ScoringProcess]) -> None:
    for worker in workers:
        worker.child.close()
