"""The client of one server, which samples one completion per call and loads weights."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from whetstone.engines.base import SamplingParams
from whetstone.engines.servers.http import HttpClient
from whetstone.engines.servers.weights import WeightUpdate
from whetstone.errors import UserError
from whetstone.types import Finish


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A completion. Where it does not name its weights, the pool asks for `Server.loaded_version`."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    weight_version: str | None


class SleepMixin(ABC):
    """Memory that is released during the update: the parts that it has, and those that are asleep."""

    can_release: Sequence[str] = ()
    asleep: Sequence[str] = ()

    @abstractmethod
    def _release(self) -> None:
        """Release the memory of `can_release`."""

    @abstractmethod
    def _resume(self, tag: str) -> None: ...

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
            self.asleep = [other for other in self.asleep if other != tag]


@dataclass
class Server(SleepMixin):
    """The client of one server. pool.py has several."""

    url: str
    _: KW_ONLY
    stops: tuple[int, ...]
    max_tokens: int  # the longest completion that will be requested
    weight_transfer: str
    group_port: int | None
    request_timeout_s: float
    is_shared: bool = False  # with other processes, which may send it weights as well

    wants_folder: bool = field(default=True, init=False)  # it loads weights from disk; known after `connect`
    identity: str | None = field(default=None, init=False)  # of the server process that got our weights

    def __post_init__(self) -> None:
        self.http = HttpClient(self.url)

    @abstractmethod
    def connect(self) -> None:
        """Read the server's settings; `UserError` if it cannot serve this run."""

    @abstractmethod
    def load(self, update: WeightUpdate) -> None:
        """Load these weights; all later completions are sampled from them."""

    @abstractmethod
    def accept_existing_weights(self, update: WeightUpdate, loaded_instance: str | None) -> bool:
        """Use these weights if another process has sent them to the server process `loaded_instance`."""

    @abstractmethod
    def loaded_version(self) -> str:
        """The version of the weights it has now: another one, or none of ours, after a restart."""

    @abstractmethod
    def complete(self, prompt_ids: Sequence[int], seed: int, sampling: SamplingParams) -> Reply: ...

    def close(self) -> None:
        """Disconnect; the server runs on."""
        self.http.cancel_all()

    def _check_length(self, length: int | None, flag: str) -> None:
        if length is not None and length <= self.max_tokens:
            raise UserError(
                f"{self.url} takes {length} tokens at most, prompt included, but max_completion_length is "
                f"{self.max_tokens}: lower it, or start the server with a larger {flag}."
            )

    def _sampling_body(self, sampling: SamplingParams) -> dict[str, Any]:
        """Settings under the names that both servers use."""
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            # Explicit, so that nothing of the model's generation_config.json takes their place.
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "stop_token_ids": sampling.stop_ids(self.stops),
            "skip_special_tokens": False,
        }


class InvalidReply(Exception):
    """A reply that violates the server's interface."""


def parse_reply(
    token_ids: Any,
    logprobs: Any,
    finish: Any,
    *,
    weight_version: str | None,
    sampling: SamplingParams,
    stops: Sequence[int],
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
    if finish == "stop" and token_ids[-1] not in sampling.stop_ids(stops):
        raise InvalidReply(f"a completion that stopped with token {token_ids[-1]}, which is no stop token")
    if finish not in ("stop", "length"):
        raise InvalidReply(f"a completion that ended with '{finish}'")
    return Reply(
        token_ids=tuple(token_ids),
        logprobs=tuple(float(p) for p in logprobs),
        finish=Finish.STOP if finish == "stop" else Finish.LENGTH,
        weight_version=weight_version,
    )
