"""What the fleet asks of a server, whoever made it: `vllm/server.py` and `sglang.py` answer.

A server samples one completion a call and says with which weights; it takes a push of weights; it is up or
not. Everything that concerns several servers is in fleet.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from whetstone.engines.base import Sampling
from whetstone.engines.servers.http import Calls
from whetstone.engines.servers.weights import Push
from whetstone.errors import UserError
from whetstone.types import Finish

MAX_SLOTS = 256  # requests under way at a server, where max_num_seqs says nothing
HEALTH_TIMEOUT_S = 2.0
CONTROL_TIMEOUT_S = 60.0  # questions that any server answers at once, unless it is busy starting
PUSH_TIMEOUT_S = 1800.0  # a large model over a slow disk


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A completion as a server gave it. `version` is the label of the weights it names, None where it names
    none: then the fleet asks (`Server.version`) before it believes.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    version: str | None


class Server(Protocol):
    calls: Calls
    wants_folder: bool  # whether a push must lie on disk for it; known after `connect`
    identity: str | None  # of the start of it that got our weights, where it has such a thing

    def connect(self) -> None:
        """Learn what runs there; `UserError` for one that can't serve this run."""
        ...

    def is_healthy(self) -> bool: ...

    def load(self, push: Push) -> None:
        """Take these weights; from now on it answers with them alone."""
        ...

    def adopt(self, push: Push, holder: str | None) -> bool:
        """Whether it has these weights already, sent by another process to the start of it with the identity
        `holder`; if so, use them.
        """
        ...

    def version(self) -> str:
        """The label of the weights it has now: another one, or none of ours, after a restart."""
        ...

    def complete(self, prompt_ids: Sequence[int], seed: int, sampling: Sampling) -> Reply: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...


class Malformed(Exception):
    """An answer that is not what the interface promises."""


def reply_of(
    token_ids: Any, logprobs: Any, finish: Any, *, version: str | None, sampling: Sampling, stops: set[int]
) -> Reply:
    """A checked reply: as many finite logprobs as tokens, and an end that fits the reason given for it."""
    if not isinstance(token_ids, list) or not token_ids or not all(type(t) is int for t in token_ids):
        raise Malformed(f"no list of token ids ({str(token_ids)[:80]})")
    if not isinstance(logprobs, list) or len(logprobs) != len(token_ids):
        count = len(logprobs) if isinstance(logprobs, list) else "no"
        raise Malformed(f"{len(token_ids)} tokens with {count} logprobs")
    if not all(isinstance(p, int | float) and math.isfinite(p) and p < 1e-3 for p in logprobs):
        raise Malformed("logprobs that are no logprobs")
    if len(token_ids) > sampling.max_tokens:
        raise Malformed(f"{len(token_ids)} tokens where at most {sampling.max_tokens} were asked for")
    if finish == "stop" and token_ids[-1] not in stops:
        raise Malformed(f"a completion that stopped with token {token_ids[-1]}, which is no stop token")
    if finish not in ("stop", "length"):
        raise Malformed(f"a completion that ended with '{finish}'")
    return Reply(
        token_ids=tuple(token_ids),
        logprobs=tuple(float(p) for p in logprobs),
        finish=Finish.STOP if finish == "stop" else Finish.LENGTH,
        version=version,
    )


def refuse_filters_without(sampling: Sampling, url: str, remedy: str) -> None:
    """For a server whose logprobs are those of temperature 1 without filters."""
    filtered = sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0
    if filtered or sampling.temperature not in (0.0, 1.0):
        raise UserError(
            f"{url} gives logprobs of temperature 1, which are not those of the sampling (temperature "
            f"{sampling.temperature:g}, top_p {sampling.top_p:g}): {remedy}"
        )
