"""Agents that bring their own loop (`agent: my_agent.py:solve`): a rollout is one call of the function.

It runs in a process of its own, as an environment's episode does, and asks the policy over HTTP. To the pool
it is an environment that is reset once, and whose answer comes when the function has returned.
"""

import contextlib
import functools
import inspect
import math
import os
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from whetstone.config.plugins import awaited, load_object
from whetstone.environments.pool import Answer, EpisodePool
from whetstone.errors import UserError
from whetstone.sandbox.worker_process import allow_open_files

MODEL = "policy"  # its name in requests; any other is answered, too
_PREFIX = "agent "  # of its name among environments
_WAKE = -1  # the number of no agent


class WrongAgent(Exception):
    """The function returned something that is no answer."""


class AgentRunner:
    """One call of the user's function."""

    def __init__(self, solve: Callable[..., Any]) -> None:
        self._solve = solve

    def reset(self, seed: int, base_url: str, problem: dict[str, Any]) -> str | None:
        """Run the agent to its end; its answer, None where its last message is."""
        os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"] = base_url, "none"
        offered = {"model": MODEL, "seed": seed}
        names = inspect.signature(self._solve).parameters
        answer = awaited(self._solve(base_url, problem, **{k: v for k, v in offered.items() if k in names}))
        if answer is not None and not isinstance(answer, str):
            kind = type(answer).__name__
            raise WrongAgent(f"the agent returned {kind}: return the answer as a text, or None")
        return answer

    def step(self, text: str) -> None:
        """Makes it an environment in Gymnasium's shape; nobody calls it."""
        raise NotImplementedError


def agent_environment(spec: str) -> str:
    """The name of an agent among environments."""
    return _PREFIX + spec


def agent_factory(name: str) -> Callable[..., Any] | None:
    """What makes the runner of an agent; None where `name` is that of an environment."""
    if not name.startswith(_PREFIX):
        return None
    spec = name.removeprefix(_PREFIX)
    solve = load_object(spec, "agent")
    try:
        inspect.signature(solve).bind("base_url", {})
    except TypeError:
        raise UserError(
            f"agent names '{spec}', which does not take two arguments: write def solve(base_url, problem)."
        ) from None
    return functools.partial(AgentRunner, solve)


class AgentPool(EpisodePool):
    """The processes of agents. Time in which an agent waits for the policy does not count (`hold`)."""

    def __init__(self, agent: str, *, timeout_s: float, memory_mb: int) -> None:
        allow_open_files()  # an agent takes two of the run
        self.environment = agent_environment(agent)
        super().__init__([self.environment], timeout_s=timeout_s, memory_mb=memory_mb)
        self._woken, self._wakes = socket.socketpair()
        self._woken.setblocking(False)
        self._wakes.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, _WAKE)

    def hold(self, number: int) -> None:
        """The agent waits for the policy: its time stops."""
        self._set_clock(number, math.inf)

    def release(self, number: int) -> None:
        """The policy has answered: its time begins anew."""
        self._set_clock(number, time.monotonic())

    def _set_clock(self, number: int, since: float) -> None:
        if (process := self._processes.get(number)) is not None:
            process.sent_at = since

    def wake(self) -> None:
        """End a `poll` that waits; from any thread."""
        with contextlib.suppress(OSError):  # full: it will wake; closed: nobody waits
            self._wakes.send(b".")

    def close(self) -> None:
        super().close()
        for end in (self._woken, self._wakes):
            end.close()

    def _read(self, number: int) -> Answer | None:
        if number == _WAKE:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(1 << 16)
            return None
        return super()._read(number)
