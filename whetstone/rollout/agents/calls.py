"""A request of an agent between two threads: the one of its connection, and the one that samples."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from whetstone.endpoint.choice import Delta
from whetstone.endpoint.http import ClientGone
from whetstone.endpoint.protocol import ApiError
from whetstone.types import Completion

POLL_S = 0.25  # between two looks whether the client is still there


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the policy said to a call."""

    prompt_ids: tuple[int, ...]
    completion: Completion
    delta: Delta  # the same as text and tool calls


@dataclass(eq=False, kw_only=True)
class Call:
    """A request that waits for the policy; with messages, or with the tokens of the whole prompt."""

    session: str
    messages: Sequence[dict[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    stops: Sequence[str] = ()
    stop_ids: frozenset[int] = frozenset()  # beside the model's own
    max_calls: int | None = None  # of tools, in one turn
    sampling: Mapping[str, float] = field(default_factory=dict)  # what the agent would sample with
    since: float = field(default_factory=time.monotonic)  # when it came
    is_repeat: bool = False  # a client sends it again, since it lost the reply
    is_gone: bool = False  # nobody waits for the reply
    _reply: Reply | ApiError | None = None
    _done: threading.Event = field(default_factory=threading.Event)

    def finish(self, reply: Reply | ApiError) -> None:
        """By the thread that samples."""
        self._reply = reply
        self._done.set()

    def wait(self, is_gone: Callable[[], bool], wake: Callable[[], None]) -> Reply:
        """By the thread of the connection."""
        while not self._done.wait(POLL_S):
            if is_gone():
                self.is_gone = True
                wake()
                raise ClientGone
        assert self._reply is not None
        if isinstance(self._reply, ApiError):
            raise self._reply
        return self._reply
