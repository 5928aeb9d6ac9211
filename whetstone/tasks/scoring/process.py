"""The pool's side of a scoring worker: starts it, sends it jobs, reads its messages without blocking.

Messages are a length and JSON. A worker that sends anything else counts as crashed: code of the user's, or
text that a model wrote, may have sent it.
"""

import contextlib
import json
import os
import select
import struct
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whetstone.config.sections import Config
from whetstone.errors import UserError
from whetstone.sandbox.fork_server import ForkedWorker, is_supported
from whetstone.sandbox.pool import free_user_number, strongest_kind
from whetstone.sandbox.worker_process import WorkerProcess
from whetstone.tasks.registry import evaluating_tasks, task_class
from whetstone.types import Message, Outcome, Problem

START_LIMIT_S = 120.0
_WORKER = "whetstone.tasks.scoring.worker"
_GRACE_S = 3.0  # an isolated process ends a fork that is late itself: the pool steps in after that
_LONGEST_MESSAGE = 64 << 20
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Job:
    kind: str  # "score": answers one by one; "custom": one of the user's functions on a list of answers
    numbers: tuple[int, ...]
    spec: str = ""


@dataclass(frozen=True, kw_only=True)
class ScoringRequest:
    problem: Problem
    text: str
    turn: str | None = None  # with what the prompt began of it; None: `text` behind `assistant_prefix`
    completion_ids: Sequence[int]
    truncated: bool
    outcome: Outcome | None = None  # of an episode; None: the task scores the text
    messages: Sequence[Message] | None = None  # of an episode: what was said behind the prompt
    environment: Mapping[str, Any] | None = None  # the state of its environment, for reward functions
    columns: Mapping[str, Any] | None = None  # extra fields of a `rollout_func`, for reward functions


class ScoringProcess:
    """A worker process, its current job, and since when it works on it."""

    def __init__(self, config: Config, *, isolated: bool) -> None:
        self.isolated = isolated
        self.ready = False
        self.job: Job | None = None
        self.round = 0  # of the pool's, in which it got the job
        self.waiting: deque[int] = deque()  # numbers of the job without a result yet; the first is in work
        settings = (config, isolation_kind(config), free_user_number()) if isolated else config
        self.process = _start(config, isolated=isolated)
        with contextlib.suppress(OSError):  # it has ended, which is seen when it is read
            self.process.connection.send(settings)
        self.since, self.limit_s = time.monotonic(), START_LIMIT_S
        self._received = bytearray()
        # Connection.poll makes a new selector each time, which costs more than a score.
        self._poll = select.poll()
        self._poll.register(self.process.connection.fileno(), select.POLLIN)

    def send_job(self, job: Job, limit_s: float, payload: Any, number: int) -> None:
        self.round = number
        self.job, self.waiting, self.limit_s = job, deque(job.numbers), limit_s + _GRACE_S * self.isolated
        self.process.connection.send((job.kind, limit_s, payload))
        self.since = time.monotonic()

    def messages(self) -> list[dict[str, Any]]:
        """What has come by now; raises `EOFError` where the process has ended or sent what is no message."""
        has_ended = False
        while not has_ended and self._poll.poll(0):
            piece = os.read(self.process.connection.fileno(), 1 << 16)
            self._received += piece
            has_ended = not piece
        received = []
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if length > _LONGEST_MESSAGE:
                raise EOFError("not a message")
            end = _LENGTH.size + length
            if len(self._received) < end:
                break
            received.append(_message(bytes(self._received[_LENGTH.size : end])))
            del self._received[:end]
            self.since = time.monotonic()
        if has_ended and not received:  # its last messages come first, its end the next time
            raise EOFError("the process has ended")
        return received

    @property
    def deadline(self) -> float:
        is_busy = self.job is not None or not self.ready
        return self.since + self.limit_s if is_busy else float("inf")


def isolation_kind(config: Config) -> str:
    """The isolation of scorers here. Without any, tasks that evaluate answers are refused."""
    try:
        return strongest_kind(config.programs.sandbox_isolation)
    except UserError as error:
        names = evaluating_tasks(config)
        if not names:
            return "limits"
        raise UserError(
            f"Scoring {', '.join(names)} evaluates what the model wrote, and this machine offers no "
            f"isolation for it ({str(error).rstrip('.')}): leave those tasks out, use a Linux machine with "
            "user namespaces or seccomp, or accept the risk with sandbox_isolation=limits."
        ) from None


def _start(config: Config, *, isolated: bool) -> WorkerProcess:
    target = f"{_WORKER}:{'serve_isolated' if isolated else 'serve'}"
    if not is_supported():
        return WorkerProcess(target, keep_environment=not isolated)
    kinds = [task_class(name) for name in (*config.tasks.datasets, *config.tasks.eval_datasets)]
    modules = {name for kind in kinds if kind.isolated == isolated for name in kind.scorer_modules}
    return ForkedWorker(target, sorted(modules), keep_environment=not isolated)


def _message(data: bytes) -> dict[str, Any]:
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        raise EOFError("not a message") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise EOFError("not a message")
    return message


def split_of(problem: Problem) -> str:
    """The split in a problem's id ("chain_sum/train/000123")."""
    return problem.id.rsplit("/", 2)[1]
