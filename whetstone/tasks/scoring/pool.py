"""The scoring pool: answers in, scores out, in worker processes with a hard time limit per answer.

Isolated workers score text; open workers run programs, and reward functions and tasks of the user's own
(`worker.py`). A worker that hangs is killed and one that dies is replaced: that answer has no score and
counts in `failures`. More failures than `max_reward_failure_fraction` allows stop the run. There is no
thread: `submit` and `gather` poll the workers.
"""

import contextlib
import math
import os
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from multiprocessing.connection import wait
from typing import Any

from whetstone.config.plugins import is_plugin
from whetstone.config.sections import Config
from whetstone.errors import UserError
from whetstone.rewards.builtin import TASK_REWARD, combine, part_names
from whetstone.rewards.verify import check_reward_funcs
from whetstone.sandbox.worker_process import available_cores
from whetstone.tasks.registry import task_class
from whetstone.tasks.scoring.batch import Batch, Pending, TaskResult
from whetstone.tasks.scoring.custom_calls import CustomCalls
from whetstone.tasks.scoring.process import Job, ScoringProcess, ScoringRequest, split_of
from whetstone.terminal.stages import reach
from whetstone.types import Score

_MAX_WORKERS = 16
_MAX_CHUNK = 16  # answers sent to a worker at once: few enough that workers share the work evenly
_POLL_S = 0.001  # answers that come faster are sent together
_MAX_CALL_S = 300.0  # for a whole list of answers given to a function of the user's own
_MAX_FAILED_STARTS = 3
_MIN_FAILURES = 3  # fewer never stop a run, whatever their share
_WINDOW = 10  # batches whose failures count together, so that small steps can't hide them


class Scorer(contextlib.AbstractContextManager["Scorer"]):
    """Scores answers in worker processes."""

    def __init__(self, config: Config) -> None:
        check_reward_funcs(config)
        self._config = config
        self._names = part_names(config.tasks.reward_funcs)
        self._limit_s = config.tasks.reward_timeout_s
        self._max_failure_fraction = config.tasks.max_reward_failure_fraction
        names = [*config.tasks.datasets, *config.tasks.eval_datasets]
        self._is_isolated = {name: task_class(name).isolated for name in names}
        self._failure_rewards: dict[tuple[str, str], float] = {}
        self._failed_starts = 0
        self.failures = 0  # answers of the last `gather` that could not be scored
        self.seconds: list[float] = []  # of scoring each answer of the last `gather`, own functions left out
        self._recent: deque[tuple[int, int]] = deque(maxlen=_WINDOW)  # (failures, answers) of past batches
        self.custom_metrics: dict[str, list[float]] = {}  # from `log_metric`, in the last `gather`
        kinds = set(self._is_isolated.values()) or {True}
        if any(map(is_plugin, config.tasks.reward_funcs)):
            kinds.add(False)
        kinds_of_workers = sorted(kinds, reverse=True) * _num_workers(config)
        self._workers = [ScoringProcess(config, isolated=isolated) for isolated in kinds_of_workers]
        self._finalizer = weakref.finalize(self, _close_all, self._workers)  # also at exit
        self._polled_at = 0.0
        self._round = 0  # results of an earlier batch that was given up are ignored
        self.discard()

    def discard(self) -> None:
        """Forget everything submitted since the last `gather`."""
        self._round += 1
        self._batch = Batch()
        self._unsent: dict[bool, deque[int]] = {True: deque(), False: deque()}  # for isolated workers, open
        funcs = dict(zip(self._config.tasks.reward_funcs, self._names, strict=True))
        self._custom = CustomCalls(funcs, self._batch)

    def submit(self, request: ScoringRequest) -> None:
        """Its score comes from `gather`. The same answer to the same problem is scored once."""
        text, length = self._turn(request), len(request.completion_ids)
        key = (id(request.problem), text, length, id(request.outcome))  # every episode has an outcome object
        if self._batch.add(request, key):
            number = len(self._batch.answers) - 1
            self._unsent[self._is_isolated[request.problem.task]].append(number)
        if time.monotonic() - self._polled_at > _POLL_S:
            self._poll(0.0)

    def _turn(self, request: ScoringRequest) -> str:
        return self._config.model.assistant_prefix + request.text if request.turn is None else request.turn

    def gather(self) -> list[Score]:
        """Wait for everything submitted since the last call: the scores in order of submission."""
        answers = self._batch.answers
        self._custom.start(range(len(answers)))
        for unsent in self._unsent.values():  # answers to a problem together: a worker knows what it just ran
            ordered = sorted(unsent, key=lambda number: id(answers[number].request.problem))
            unsent.clear()
            unsent.extend(ordered)
        try:
            while self._batch.num_unscored or self._custom.pending:
                self._poll(1.0)
                self._check_failures()
                reach(len(answers) - self._batch.num_unscored)
            for pending in answers:
                if pending.same_as is not None and pending.same_as.result is not None:
                    self._batch.record(pending, pending.same_as.result)
            for pending in answers:  # else it would be trained on as if it were worth 0
                if pending.failure is None and not any(name in pending.parts for name in self._names):
                    self._batch.fail(pending, "no reward function returned a number")
            self._check_failures()
            self.failures = len(self._batch.failed)
            self._recent.append((self.failures, len(answers)))
            self.custom_metrics = self._custom.metrics
            results = [pending.result for pending in answers if pending.result is not None]
            self.seconds = [self._limit_s if r.seconds is None else r.seconds for r in results]
            return [self._final_score(*both) for both in zip(answers, results, strict=True)]
        finally:
            for index, worker in enumerate(self._workers):
                if worker.job is not None:  # only after an error
                    self._restart(index)
            self.discard()

    @contextlib.contextmanager
    def probing(self) -> Iterator[None]:
        """Inside, failures are reported and stop nothing; later batches do not count them."""
        recent, self._recent = self._recent, deque(maxlen=_WINDOW)
        self._max_failure_fraction = 1.0
        try:
            yield
        finally:
            self._recent = recent
            self._max_failure_fraction = self._config.tasks.max_reward_failure_fraction

    def close(self) -> None:
        """End the workers. May be called twice."""
        self._finalizer()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _poll(self, timeout_s: float) -> None:
        """Send jobs to idle workers, read messages, replace workers that hang or have died."""
        assert self._finalizer.alive, "the scorer is closed"
        self._send_jobs()
        deadline = min(worker.deadline for worker in self._workers)
        if timeout_s:
            pause = min(timeout_s, max(0.0, deadline - time.monotonic()) + 0.01)
            wait([worker.process.connection for worker in self._workers], pause)
        for index, worker in enumerate(self._workers):
            try:
                for message in worker.messages():
                    self._on_message(worker, message)
            except UserError:
                raise
            except (EOFError, OSError, KeyError, TypeError, ValueError):  # ended, or sent what is no message
                self._replace(index, "crash")
                continue
            if time.monotonic() > worker.deadline:
                self._replace(index, "timeout")
        self._send_jobs()
        self._polled_at = time.monotonic()

    def _send_jobs(self) -> None:
        for index, worker in enumerate(self._workers):
            if worker.ready and worker.job is None and (job := self._next_job(worker)) is not None:
                self._send_job(index, worker, job)

    def _next_job(self, worker: ScoringProcess) -> Job | None:
        unsent = self._unsent[worker.isolated]
        if unsent:
            colleagues = sum(other.isolated == worker.isolated for other in self._workers)
            size = min(_MAX_CHUNK, len(unsent), max(1, -(-len(unsent) // (2 * colleagues))))
            alone = (max(1, n) for n in range(size) if self._batch.answers[unsent[n]].is_alone)
            size = next(alone, size)
            return Job("score", tuple(unsent.popleft() for _ in range(size)))
        return self._custom.jobs.popleft() if self._custom.jobs and not worker.isolated else None

    def _send_job(self, index: int, worker: ScoringProcess, job: Job) -> None:
        requests = [self._batch.answers[number].request for number in job.numbers]
        if job.kind == "score":
            limit_s = self._limit_s
            rows = zip(job.numbers, requests, strict=True)
            payload: Any = [
                (number, r.problem, self._turn(r), len(r.completion_ids), r.truncated, r.outcome)
                for number, r in rows
            ]
        else:
            limit_s = min(self._limit_s * len(requests), max(self._limit_s, _MAX_CALL_S))
            payload = (job.spec, requests)
        try:
            worker.send_job(job, limit_s, payload, self._round)
        except OSError:  # it died while it was idle: no answer is to blame
            worker.job = None
            self._put_back(job, job.numbers, worker.isolated)
            self._replace(index, "crash")

    def _on_message(self, worker: ScoringProcess, message: Mapping[str, Any]) -> None:
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
            for split, name, value in message["failure_rewards"]:
                self._failure_rewards[split, name] = float(value)
        elif kind == "scored":
            for result in message["results"]:
                self._on_score(worker, result)
        else:
            job, worker.job = worker.job, None
            if job is None or job.kind != "custom":
                raise ValueError("a result that nobody asked for")
            if worker.round == self._round:
                self._custom.on_result(job, message)

    def _on_score(self, worker: ScoringProcess, result: Mapping[str, Any]) -> None:
        number = result["number"]
        if worker.waiting.popleft() != number:
            raise ValueError("a result for another answer")
        parts = {str(name): float(value) for name, value in result["parts"].items()}
        failure = result["failure"] or ("timeout" if result["seconds"] > self._limit_s else None)
        if not all(math.isfinite(value) for value in parts.values()):
            failure = failure or "error: a score that is not finite"
        outcome = (result["answer"], result["outcome"], tuple(result["tests"]))
        if worker.round == self._round:
            self._record(number, TaskResult(parts, failure, result["seconds"], *outcome))
        if not worker.waiting:
            worker.job = None

    def _replace(self, index: int, failure: str) -> None:
        """Replace a worker that hangs or died. The answer in work fails; the rest goes to other workers.

        An isolated worker may have scored some of its answers without having sent the results. So it is not
        known which of them was in work: all are scored again, each in a job of its own.
        """
        worker = self._workers[index]
        worker.process.close()
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= _MAX_FAILED_STARTS:
                raise UserError(
                    "The processes that score answers end at once (exit code "
                    f"{worker.process.process.returncode}): see what they printed above; most often memory "
                    "is short, or a reward file ends the process."
                )
        self._restart(index)
        if worker.job is None or worker.round != self._round:
            return
        if worker.job.kind == "custom":
            self._custom.on_failure(worker.job, failure)
        elif worker.isolated and len(worker.waiting) > 1:
            for number in worker.waiting:
                self._batch.answers[number].is_alone = True
            self._put_back(worker.job, tuple(worker.waiting), worker.isolated)
        else:
            suspect, *rest = worker.waiting
            pending = self._batch.answers[suspect]
            if failure == "crash" and not pending.has_crashed:
                pending.has_crashed = True  # the worker may have been killed from outside: try again
                rest = [suspect, *rest]
            else:
                self._record(suspect, TaskResult({}, failure))
            self._put_back(worker.job, tuple(rest), worker.isolated)

    def _put_back(self, job: Job, numbers: tuple[int, ...], isolated: bool) -> None:
        if job.kind == "score":
            self._unsent[isolated].extendleft(reversed(numbers))
        else:
            self._custom.jobs.appendleft(job)

    def _restart(self, index: int) -> None:
        self._workers[index].process.close()
        self._workers[index] = ScoringProcess(self._config, isolated=self._workers[index].isolated)

    def _record(self, number: int, result: TaskResult) -> None:
        pending = self._batch.answers[number]
        if result.failure:
            problem = pending.request.problem
            reward = self._failure_rewards.get((split_of(problem), problem.task), 0.0)
            parts = {"correct": 0.0, **({TASK_REWARD: reward} if TASK_REWARD in self._names else {})}
            result = result._replace(parts=parts)
        self._batch.record(pending, result)

    def _check_failures(self) -> None:
        """Raise where this batch, alone or with the recent ones, has more failures than allowed."""
        failed = self._batch.failed
        if not failed:
            return
        share = self._max_failure_fraction
        now = (len(failed), len(self._batch.answers))
        for batches in ([now], [now, *self._recent]):
            count, total = (sum(numbers) for numbers in zip(*batches, strict=True))
            if count >= _MIN_FAILURES and count > share * total:
                request, reason = failed[0].request, failed[0].failure
                raise UserError(
                    f"Scoring failed on {count} of {total} answers, more than max_reward_failure_fraction "
                    f"({share:g}) allows. The first was {request.problem.id} with '{reason}', on the text "
                    f"{request.text[-200:]!r}: mend the reward, or raise reward_timeout_s "
                    f"({self._limit_s:g} s) or that share."
                )

    def _final_score(self, pending: Pending, result: TaskResult) -> Score:
        parts, failure = pending.parts, pending.failure
        paid = {
            name: value for name, value in parts.items() if not failure or (name == TASK_REWARD and value < 0)
        }
        return Score(
            reward=combine(paid, self._names, self._config.tasks.reward_weights),
            parts={name: parts[name] for name in ("correct", *self._names) if name in parts},
            failure=failure,
            extra=pending.extra,
            answer=result.answer,
            outcome=result.outcome,
            tests=result.tests,
        )


def _num_workers(config: Config) -> int:
    if config.tasks.reward_workers:
        return config.tasks.reward_workers
    cores = available_cores()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # a launcher's: the ranks of a host share its cores
    return min(_MAX_WORKERS, max(1, cores // 2 // ranks))


def _close_all(workers: list[ScoringProcess]) -> None:
    for worker in workers:
        worker.process.close()
