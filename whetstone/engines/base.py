"""The interface between sampling and training. An engine turns prompts into completions with the logprobs of
the policy that sampled them; it knows nothing of problems, rewards or losses.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from whetstone.errors import UserError
from whetstone.types import Completion, Finish, TopLogprobs

# Of sampling parameters. What lies below divides logits into numbers that float32 does not have.
LIMITS: dict[str, tuple[float, float]] = {
    "temperature": (1e-6, 1_000),
    "top_p": (1e-6, 1),
    "top_k": (0, 16_777_216),
    "min_p": (0, 1),
    "max_tokens": (1, 16_777_216),
}

if TYPE_CHECKING:  # packages without torch import this module
    from whetstone.model.policy import Policy


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and one seed for each of its samples."""

    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    max_tokens: tuple[int, ...] | None = None  # one limit per sample, where they differ
    sampling: "SamplingParams | None" = None  # its own, where requests differ
    adapter: int = 0  # the number of a LoRA adapter (model/adapters.py); 0: none
    # Turns of a conversation: an engine may keep keys and values of its samples for later requests.
    may_continue: bool = False
    continues: tuple[int, int] | None = None  # (request, sample); both together are the start of this prompt

    def limit(self, sample: int, sampling: "SamplingParams") -> int:
        return self.params(sampling).max_tokens if self.max_tokens is None else self.max_tokens[sample]

    def params(self, sampling: "SamplingParams") -> "SamplingParams":
        """Its sampling parameters, where those of all requests are `sampling`."""
        return sampling if self.sampling is None else self.sampling

    def sample_params(self, sample: int, sampling: "SamplingParams") -> "SamplingParams":
        """Those of one of its samples, with its own limit."""
        return replace(self.params(sampling), max_tokens=self.limit(sample, sampling))


class RequestStream(Protocol):
    """Requests that come while others are sampled: the turns of episodes, the clients of a server. Their
    numbers continue those of the requests that `generate` began with.
    """

    max_prompt_length: int  # of any request, now and later
    max_length: int | None  # of any prompt with its completion; None: no limit beside that of each
    num_sequences: int  # samples that can be wanted at once

    def take(self, *, wait: bool) -> list[Request]:
        """New requests. With `wait` it blocks until there are some; none then: no more will come."""
        ...

    def cancelled(self) -> Sequence[tuple[int, int]]:
        """(request, sample) that nobody wants any more, since the last call; some may have ended."""
        ...


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters. Temperature 0 is greedy: without filters, with the logprobs of temperature 1."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    min_p: float = 0.0
    ignore_eos: bool = False  # sample max_tokens tokens (benchmarks)
    num_top: int = 0  # likeliest tokens whose logprobs are wanted, too (the native engine on a CPU)

    def __post_init__(self) -> None:
        for name, (low, high) in LIMITS.items():
            value = getattr(self, name)
            if not (low <= value <= high or (name == "temperature" and value == 0)):
                greedy = "0 (greedy) or " if name == "temperature" else ""
                raise UserError(f"{name} is {value}: give {greedy}a number from {low:g} to {high:,}.")

    @property
    def is_filtered(self) -> bool:
        return not self.is_greedy and (bool(self.top_k) or self.top_p < 1 or self.min_p > 0)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def distribution(self) -> tuple[float, ...]:
        """What a token's probability depends on, beside the logits."""
        return self.temperature, self.top_p, self.min_p, self.top_k

    def stop_ids(self, token_ids: Sequence[int]) -> list[int]:
        """Those of the policy's stop tokens that end a completion."""
        return [] if self.ignore_eos else list(token_ids)


@dataclass(frozen=True, kw_only=True)
class GenerationOutput:
    """A finished sample: the index of its request, the index of its seed, and the completion."""

    request: int
    sample: int
    completion: Completion
    top: Sequence[TopLogprobs] = ()  # of each token, where `num_top` asks for them


@dataclass(frozen=True, kw_only=True)
class PartialOutput:
    """An unfinished sample of `stream`: its tokens so far, in lists that grow while it is sampled."""

    request: int
    sample: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    top: Sequence[TopLogprobs] = ()


@dataclass(frozen=True, kw_only=True)
class Room:
    """What a call of `generate` needs space for."""

    prompt: int  # tokens of the longest prompt
    total: int  # of the longest prompt with its completion
    sequences: int  # at once


def measure_room(requests: list[Request], sampling: SamplingParams, stream: RequestStream | None) -> Room:
    prompt = max((len(request.prompt_ids) for request in requests), default=0)
    sequences = sum(len(request.seeds) for request in requests)
    total = None
    if stream is not None:
        prompt, sequences = max(prompt, stream.max_prompt_length), max(sequences, stream.num_sequences)
        total = stream.max_length
    longest = prompt + sampling.max_tokens
    return Room(prompt=prompt, total=longest if total is None else min(longest, total), sequences=sequences)


class Engine(Protocol):
    """Samples from the policy and yields each sample when it is finished. An engine that takes further
    requests while it samples has the method `generate_open` as well (see the function of that name).

    With `async_rollouts`, `generate` runs in a thread while the policy trains, and `update_weights` is called
    only in between: `make_engine` then builds an engine with a copy of the weights.
    """

    def generate(self, requests: list[Request], sampling: SamplingParams) -> Iterator[GenerationOutput]: ...

    def update_weights(self, policy_version: int) -> None:
        """Load the policy's new weights; later completions carry `policy_version`."""
        ...

    def sleep(self) -> None:
        """Release GPU memory for the update, until `wake`."""
        ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


def generate_open(
    engine: Engine, requests: list[Request], sampling: SamplingParams, stream: RequestStream
) -> Iterator[GenerationOutput]:
    """Samples of `requests` and of those that come meanwhile.

    An engine without `generate_open` of its own works in rounds: what comes during a round waits.
    """
    if (own := getattr(engine, "generate_open", None)) is not None:
        yield from own(requests, sampling, stream)
        return
    first = 0  # number of the round's first request
    requests = requests or stream.take(wait=True)
    while requests:
        for output in engine.generate(requests, sampling):
            yield replace(output, request=first + output.request)
        first += len(requests)
        requests = stream.take(wait=True)


class EngineBase:
    """An engine without weights or memory of its own: the policy and its version."""

    def __init__(self, policy: "Policy"):
        self.policy = policy
        self.policy_version = 0

    def output(
        self, request: int, sample: int, tokens: Sequence[int], logprobs: Sequence[float], finish: Finish
    ) -> GenerationOutput:
        completion = Completion(
            token_ids=tuple(tokens),
            logprobs=tuple(logprobs),
            finish=finish,
            policy_version=self.policy_version,
        )
        return GenerationOutput(request=request, sample=sample, completion=completion)

    def update_weights(self, policy_version: int) -> None:
        self.policy_version = policy_version

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class EngineWrapper:
    """An engine that forwards every call to another one."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def generate(self, requests: list[Request], sampling: SamplingParams) -> Iterator[GenerationOutput]:
        return self.engine.generate(requests, sampling)

    def generate_open(
        self, requests: list[Request], sampling: SamplingParams, stream: RequestStream
    ) -> Iterator[GenerationOutput]:
        return generate_open(self.engine, requests, sampling, stream)

    def update_weights(self, policy_version: int) -> None:
        self.engine.update_weights(policy_version)

    def sleep(self) -> None:
        self.engine.sleep()

    def wake(self) -> None:
        self.engine.wake()

    def close(self) -> None:
        self.engine.close()


class SyncedCopyEngine(EngineWrapper):
    """`engine` samples from a copy of the policy; `refresh` copies the policy's weights to it."""

    def __init__(self, engine: Engine, refresh: Callable[[], None]):
        super().__init__(engine)
        self.refresh = refresh

    def update_weights(self, policy_version: int) -> None:
        self.refresh()
        super().update_weights(policy_version)
