"""Runs third-party parsers on a model's text in a disposable fork.

`evaluate(function, *arguments)` calls the function. In a scoring process that has called `enable`, a forked
process makes the call: it has a time limit and its own memory, and returns one number. A fork serves up to
64 calls, because a fork costs as much as a call. It is replaced after that, and after a call that hangs, dies
or was refused by the code guard. Without `enable` (tests, a task's own gold answers) the call is direct.
"""

import contextlib
import math
import os
import pickle
import select
import signal
import struct
import time
from collections.abc import Callable
from typing import Any

from whetstone.sandbox import code_guard, protocol

_NUMBER = struct.Struct("<d")
_LENGTH = struct.Struct("<I")
_CALLS_PER_FORK = 64


class EvaluationFailed(Exception):
    """The call gave no number: `timeout` or `crash`."""


class _Fork:
    """A forked process that evaluates one call after the other."""

    def __init__(self) -> None:
        self.count = 0
        calls, self.calls = os.pipe()
        self.numbers, numbers = os.pipe()
        with code_guard.trusted():
            self.process = os.fork()
        if self.process == 0:
            os.close(self.calls)
            os.close(self.numbers)
            _serve(calls, numbers)
        os.close(calls)
        os.close(numbers)

    def call(self, function: Callable[..., float], arguments: tuple[Any, ...], limit_s: float) -> float:
        data = pickle.dumps((function, arguments))
        deadline = time.monotonic() + limit_s
        try:
            protocol.write_all(self.calls, _LENGTH.pack(len(data)) + data)
            answer = b""
            while len(answer) < _NUMBER.size:
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0 or not select.select([self.numbers], [], [], remaining_s)[0]:
                    raise EvaluationFailed("timeout")
                piece = os.read(self.numbers, _NUMBER.size - len(answer))
                if not piece:
                    raise EvaluationFailed("crash")
                answer += piece
        except BrokenPipeError:
            raise EvaluationFailed("crash") from None
        (value,) = _NUMBER.unpack(answer)
        return value

    def end(self) -> None:
        os.close(self.calls)
        os.close(self.numbers)
        with code_guard.trusted(), contextlib.suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)


_limit_s: float | None = None
_fork: _Fork | None = None


def enable(limit_s: float) -> None:
    """Evaluate in forks from now on, each call within `limit_s`."""
    global _limit_s
    _limit_s = limit_s


def renew() -> None:
    """Throw the fork away: what was evaluated so far can't change what comes."""
    global _fork
    if _fork is not None:
        _fork.end()
        _fork = None


def evaluate(function: Callable[..., float], *arguments: Any) -> float:
    """Its number; `EvaluationFailed` where it hangs or dies. Function and arguments are pickled."""
    global _fork
    if _limit_s is None:
        return float(function(*arguments))
    if _fork is not None and _fork.count >= _CALLS_PER_FORK:
        renew()
    if _fork is None:
        _fork = _Fork()
    _fork.count += 1
    try:
        value = _fork.call(function, arguments, _limit_s)
    except EvaluationFailed:
        renew()
        raise
    if not math.isfinite(value):  # the fork says that the code guard has refused something
        renew()
        return 0.0
    return value


def _serve(calls: int, numbers: int) -> None:
    """The fork's side: ends with the pipe."""
    try:
        while True:
            (length,) = _LENGTH.unpack(protocol.read_exactly(calls, _LENGTH.size))
            data = protocol.read_exactly(calls, length)
            with code_guard.trusted():
                function, arguments = pickle.loads(data)
            refusals = code_guard.num_refused
            value = float(function(*arguments))
            value = value if code_guard.num_refused == refusals else math.nan
            protocol.write_all(numbers, _NUMBER.pack(value))
    finally:  # the pipe ended, or the function raised: the other side sees that there is no number
        os._exit(1)
