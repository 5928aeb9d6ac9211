"""The client of one server: `vllm/server.py` and `sglang.py` implement it.

A server samples one completion per call and reports the version of its weights; it loads new weights.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from whetstone.engines.base import SamplingParams
from whetstone.engines.servers.http import HttpClient, RequestRejected, Unreachable
from whetstone.engines.servers.weights import WeightUpdate
from whetstone.errors import UserError
from whetstone.types import Finish

MAX_SLOTS = 256  # concurrent requests of a server, if max_num_seqs is not set
HEALTH_TIMEOUT_S = 2.0
CONTROL_TIMEOUT_S = 60.0  # short requests
PUSH_TIMEOUT_S = 1800.0  # a large model over a slow disk


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A completion of a server. `weight_version` is None if the reply does not name its weights: then the
    pool asks the server (`Server.loaded_version`).
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    weight_version: str | None


class Server(ABC):
    """The client of one server. Several servers are the business of pool.py."""

    def __init__(
        self,
        url: str,
        *,
        stops: tuple[int, ...],
        max_tokens: int,
        weight_transfer: str,
        group_port: int | None,
        request_timeout_s: float,
        is_shared: bool = False,
    ):
        self.http = HttpClient(url)
        self.stops = stops
        self.max_tokens = max_tokens  # the longest completion that will be requested
        self.weight_transfer = weight_transfer
        self.group_port = group_port
        self.request_timeout_s = request_timeout_s
        self.is_shared = is_shared  # with other processes, which may send it weights as well
        self.wants_folder = True  # whether it loads weights from disk; known after `connect`
        self.identity: str | None = None  # of the server process that got our weights, if it has one
        self.can_release: list[str] = []  # parts of its memory
        self.asleep: list[str] = []  # those that are released

    @abstractmethod
    def connect(self) -> None:
        """Read the server's settings; `UserError` if it cannot serve this run."""

    @abstractmethod
    def load(self, update: WeightUpdate) -> None:
        """Load these weights; all later completions are sampled from them."""

    @abstractmethod
    def accept_existing_weights(self, update: WeightUpdate, loaded_instance: str | None) -> bool:
        """Whether it has these weights already, sent by another process to the server process with the
        identity `loaded_instance`; if so, use them.
        """

    @abstractmethod
    def loaded_version(self) -> str:
        """The version of the weights it has now: another one, or none of ours, after a restart."""

    @abstractmethod
    def complete(self, prompt_ids: Sequence[int], seed: int, sampling: SamplingParams) -> Reply: ...

    @abstractmethod
    def _release(self) -> None:
        """Release the memory of `can_release`."""

    @abstractmethod
    def _resume(self, tag: str) -> None: ...

    def is_healthy(self) -> bool:
        return is_healthy(self.http)

    def sleep(self) -> None:
        if self.can_release and not self.asleep:
            self._release()
            self.asleep = list(self.can_release)

    def wake(self) -> None:
        self._wake("weights")
        self._wake("kv_cache")

    def _wake(self, tag: str) -> None:
        if tag in self.asleep:
            self._resume(tag)
            self.asleep.remove(tag)

    def close(self) -> None:
        """Disconnect; the server runs on."""
        self.http.cancel_all()

    def _post(self, path: str, body: Any, timeout_s: float = CONTROL_TIMEOUT_S) -> Any:
        return self.http.post(path, body, timeout_s=timeout_s)


def is_healthy(http: HttpClient) -> bool:
    try:
        http.get("/health", timeout_s=HEALTH_TIMEOUT_S)
    except (Unreachable, RequestRejected):
        return False
    return True


class InvalidReply(Exception):
    """A reply that violates the server's interface."""


def parse_reply(
    token_ids: Any,
    logprobs: Any,
    finish: Any,
    *,
    weight_version: str | None,
    sampling: SamplingParams,
    stops: set[int],
) -> Reply:
    """A checked reply: one finite logprob per token, and an end that fits the finish reason."""
    if not isinstance(token_ids, list) or not token_ids or not all(type(t) is int for t in token_ids):
        raise InvalidReply(f"no list of token ids ({str(token_ids)[:80]})")
    if not isinstance(logprobs, list) or len(logprobs) != len(token_ids):
        count = len(logprobs) if isinstance(logprobs, list) else "no"
        raise InvalidReply(f"{len(token_ids)} tokens with {count} logprobs")
    if not all(isinstance(p, int | float) and math.isfinite(p) and p < 1e-3 for p in logprobs):
        raise InvalidReply("logprobs that are no logprobs")
    if len(token_ids) > sampling.max_tokens:
        raise InvalidReply(f"{len(token_ids)} tokens where at most {sampling.max_tokens} were asked for")
    if finish == "stop" and token_ids[-1] not in stops:
        raise InvalidReply(f"a completion that stopped with token {token_ids[-1]}, which is no stop token")
    if finish not in ("stop", "length"):
        raise InvalidReply(f"a completion that ended with '{finish}'")
    return Reply(
        token_ids=tuple(token_ids),
        logprobs=tuple(float(p) for p in logprobs),
        finish=Finish.STOP if finish == "stop" else Finish.LENGTH,
        weight_version=weight_version,
    )


def require_unfiltered_sampling(sampling: SamplingParams, url: str, remedy: str) -> None:
    """For a server whose logprobs are those of temperature 1 without filters."""
    filtered = sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0
    if filtered or sampling.temperature not in (0.0, 1.0):
        raise UserError(
            f"{url} gives logprobs of temperature 1, which are not those of the sampling (temperature "
            f"{sampling.temperature:g}, top_p {sampling.top_p:g}): {remedy}"
        )
