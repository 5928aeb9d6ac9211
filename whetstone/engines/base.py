"""The seam between sampling and training: what every engine offers.

An engine turns prompts into completions with the logprobs of the policy that sampled them. It knows nothing
of problems, rewards or losses.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from whetstone.types import Completion


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and how many samples are wanted of it: one seed per sample."""

    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    max_tokens: tuple[int, ...] | None = None  # one limit per sample, where they differ

    def limit(self, sample: int, sampling: "SamplingParams") -> int:
        return sampling.max_tokens if self.max_tokens is None else self.max_tokens[sample]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. Temperature 0 is greedy (logprobs are then those of temperature 1).

    Which tokens end an answer is the model's affair: engines know it.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    min_p: float = 0.0
    ignore_eos: bool = False  # go on to max_tokens whatever the model says (benchmarks)


@dataclass(frozen=True, kw_only=True)
class GenerationOutput:
    """A finished sample: which request, which of its seeds, what came out."""

    request: int
    sample: int
    completion: Completion


class Engine(Protocol):
    """Samples from the policy. Samples are yielded as they finish, so scoring need not wait for the
    slowest.

    Whoever has `async_rollouts` runs `generate` in a thread while the policy trains, and calls
    `update_weights` only in between: `make_engine` then builds an engine with weights of its own.
    """

    def generate(self, requests: list[Request], sampling: SamplingParams) -> Iterator[GenerationOutput]: ...

    def update_weights(self, policy_version: int) -> None:
        """The policy has new weights: take them over; completions carry `policy_version` from now on."""
        ...

    def sleep(self) -> None:
        """Give back memory until `wake`: the update needs it."""
        ...

    def wake(self) -> None: ...

    def close(self) -> None: ...
