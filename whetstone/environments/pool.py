"""The run's side of episodes: starts them, sends what the policy said, and reads answers without blocking.

Hundreds of episodes run at once, each in its own process. One that does not answer in time is ended; one that
crashes or answers nonsense has failed. Both cost their own rollout only.
"""

import contextlib
import math
import os
import selectors
import socket
import subprocess
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import reduction
from typing import Any

from whetstone.environments.calls import MAX_LEVELS
from whetstone.environments.messages import BadMessage, pack, unpack
from whetstone.errors import UserError
from whetstone.files import json_safe, num_levels
from whetstone.sandbox.service import SandboxService
from whetstone.sandbox.worker_process import WorkerProcess
from whetstone.types import Message

START_LIMIT_S, CLOSE_LIMIT_S = 120.0, 5.0
GRACE_S = 2.0  # for the rest of an answer that has begun to come: its process waits until it is read
MAX_ERROR = 500  # characters


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What an environment said to one message."""

    number: int  # of the episode
    observation: tuple[Message, ...] = ()  # put before the policy next
    reward: float | None = None
    done: bool = False
    correct: bool | None = None
    state: dict[str, Any] | None = None  # plain attributes of the environment, at its end
    num_tool_calls: int = 0
    num_tool_errors: int = 0
    seconds: float = 0.0
    error: str | None = None  # the episode has failed: it is over
    is_timeout: bool = False


@dataclass
class _Process:
    link: socket.socket
    received: bytearray = field(default_factory=bytearray)
    sent_at: float = 0.0
    is_waiting: bool = False  # whether an answer is due
    grace_until: float = 0.0


class EpisodePool(contextlib.AbstractContextManager["EpisodePool"]):
    def __init__(
        self,
        environments: Sequence[str],
        *,
        timeout_s: float,
        memory_mb: int,
        tools: Sequence[str] = (),
        tool_settings: Mapping[str, Any] | None = None,
        with_state: bool = False,
        sandbox_isolation: str | None = None,
    ) -> None:
        """`with_state`: environments tell their attributes at the end, which reward functions may read.

        `sandbox_isolation`: of the sandbox that episodes share, where they run programs.
        """
        self.timeout_s = timeout_s
        sandbox = None if sandbox_isolation is None else SandboxService(sandbox_isolation)
        self._host = WorkerProcess("whetstone.environments.host:serve")
        self._finalizer = weakref.finalize(self, _close, self._host, sandbox)  # also at exit
        settings = {
            "environments": list(environments),
            "memory_bytes": memory_mb << 20,
            "tools": list(tools),
            "tool_settings": dict(tool_settings or {}),
            "with_state": with_state,
            "sandbox": None if sandbox is None else sandbox.address,
        }
        self._host.connection.send(settings)
        self._processes: dict[int, _Process] = {}
        self._selector = selectors.DefaultSelector()
        self._failed: list[Answer] = []  # known before anything was read
        if not self._host.connection.poll(START_LIMIT_S):
            raise UserError(f"The environments took more than {START_LIMIT_S:g} s to import: look into them.")
        try:
            answer = self._host.connection.recv()
        except EOFError:
            raise UserError("The process of the environments ended while it imported them.") from None
        if "error" in answer:
            raise UserError(answer["error"])

    def start(
        self, number: int, environment: str, settings: Mapping[str, Any], seed: int, row: Mapping[str, Any]
    ) -> None:
        """Begin an episode; the answer has its first observation."""
        ours, theirs = socket.socketpair()
        with theirs:
            request = {
                "do": "start", "number": number, "environment": environment, "settings": dict(settings)
            }  # fmt: skip
            self._host.connection.send(request)
            reduction.send_handle(self._host.connection, theirs.fileno(), None)
        ours.setblocking(False)
        self._processes[number] = _Process(ours)
        self._selector.register(ours, selectors.EVENT_READ, number)
        self._send(number, {"do": "reset", "seed": seed, "row": dict(row)})

    def step(self, number: int, text: str, calls: Sequence[Mapping[str, Any]] = ()) -> None:
        self._send(number, {"do": "step", "text": text, "calls": [dict(call) for call in calls]})

    def finish(self, number: int) -> None:
        """Ask for the reward of the whole episode."""
        self._send(number, {"do": "finish"})

    @property
    def num_due(self) -> int:
        """Episodes that have not answered yet."""
        return sum(process.is_waiting for process in self._processes.values())

    def poll(self, timeout_s: float) -> list[Answer]:
        """Answers that have come, after at most `timeout_s`."""
        answers, self._failed = self._failed, []
        due = [process for process in self._processes.values() if process.is_waiting]
        if not due:
            return answers
        earliest = min(map(self._deadline, due))
        pause = 0.0 if answers else max(0.0, min(timeout_s, earliest - time.monotonic()))
        for key, _ in self._selector.select(pause):
            if (answer := self._read(key.data)) is not None:
                answers.append(answer)
        now = time.monotonic()
        late = [n for n, p in self._processes.items() if p.is_waiting and now > self._deadline(p)]
        return answers + [self._fail(n, f"no answer in {self.timeout_s:g} s", timeout=True) for n in late]

    def _deadline(self, process: _Process) -> float:
        return max(process.sent_at + self.timeout_s, process.grace_until)

    def end(self, number: int) -> None:
        """End an episode's process. May be called twice."""
        if (process := self._processes.pop(number, None)) is not None:
            self._selector.unregister(process.link)
            process.link.close()
            self._host.connection.send({"do": "end", "number": number})

    def end_all(self) -> None:
        for number in list(self._processes):
            self.end(number)
        self._failed = []

    def close(self) -> None:
        """May be called twice."""
        if self._finalizer.alive:
            self.end_all()
            self._finalizer()
            self._selector.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, number: int, message: dict[str, Any]) -> None:
        process = self._processes.get(number)
        if process is None:
            return
        process.sent_at, process.is_waiting = time.monotonic(), True
        try:
            process.link.setblocking(True)
            process.link.settimeout(self.timeout_s)
            process.link.sendall(pack(message))
            process.link.setblocking(False)
        except OSError:
            self._failed.append(self._fail(number, "its process has ended"))

    def _read(self, number: int) -> Answer | None:
        process = self._processes[number]
        try:
            while (message := unpack(process.received)) is None:  # until all that has come is read
                piece = os.read(process.link.fileno(), 1 << 20)
                if not piece:
                    return self._fail(number, "its process has ended")
                process.received += piece
                process.grace_until = time.monotonic() + GRACE_S
            if not process.is_waiting:
                return self._fail(number, "it answered what was not asked")
            process.is_waiting = False
            return _answer(number, message, time.monotonic() - process.sent_at)
        except BlockingIOError:
            return None
        except (BadMessage, OSError) as error:
            return self._fail(number, str(error) or type(error).__name__)

    def _fail(self, number: int, reason: str, *, timeout: bool = False) -> Answer:
        seconds = time.monotonic() - self._processes[number].sent_at
        self.end(number)
        return Answer(number=number, done=True, error=reason, is_timeout=timeout, seconds=seconds)


def _close(host: WorkerProcess, sandbox: SandboxService | None) -> None:
    """End the host after it has ended all episodes, and their sandbox."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        host.connection.send({"do": "close"})
        host.process.wait(timeout=CLOSE_LIMIT_S)
    host.close()
    if sandbox is not None:
        sandbox.close()


def _answer(number: int, message: Mapping[str, Any], elapsed: float) -> Answer:
    """A message as an answer. The door for what an environment, a tool or an agent says: the process may have
    written anything, and what passes can be shown, encoded and written.
    """
    if num_levels(message) > MAX_LEVELS:
        raise BadMessage("an answer that is nested too deep")
    message = json_safe(message)
    seconds = message.get("seconds")  # by its own clock: nobody may have looked for the answer for long
    seconds = min(max(0.0, seconds), elapsed) if isinstance(seconds, float) else elapsed
    if isinstance(error := message.get("error"), str):
        return Answer(number=number, done=True, error=error[:MAX_ERROR], seconds=seconds)
    observation = message.get("observation", "")
    messages = message.get("messages", [])
    reward, correct, state = message.get("reward"), message.get("correct"), message.get("state")
    if not isinstance(observation, str) or not isinstance(messages, list):
        raise BadMessage("no observation")
    if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
        raise BadMessage("no number as the reward")
    content = [{"role": "user", "content": observation}] if observation else []
    for entry in messages:
        if not (isinstance(entry, dict) and isinstance(entry.get("content"), str)):
            raise BadMessage("no message of a tool")
        if entry.get("role") == "user":
            content.append({"role": "user", "content": entry["content"]})
        else:
            content.append({"role": "tool", "name": str(entry.get("name", "")), "content": entry["content"]})
    return Answer(
        number=number,
        observation=tuple(content),
        reward=None if reward is None else float(reward),
        done=message.get("done") is True,
        correct=correct if isinstance(correct, bool) else None,
        state=state if isinstance(state, dict) else None,
        num_tool_calls=_count(message.get("num_tool_calls")),
        num_tool_errors=_count(message.get("num_tool_errors")),
        seconds=seconds,
    )


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value >= 0 else 0
