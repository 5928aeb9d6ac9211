"""The interface between requests and sampling: a prompt goes in, tokens with their logprobs come out.

The endpoint (api.py) knows nothing of engines. Another backend can wrap this one, to record what was sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from whetstone.endpoint.choice import TokenChunk
from whetstone.engines.base import SamplingParams


class BackendUnavailable(Exception):
    """The backend can't answer: it is full, it is stopping, or it failed."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A prompt, and one seed for each of its samples."""

    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    sampling: SamplingParams
    adapter: int = 0  # by number; 0: the model itself
    is_streamed: bool = True  # False: the tokens of a sample come together, when it is finished


def merge_chunks(chunks: Sequence[TokenChunk]) -> list[TokenChunk]:
    """One chunk for each sample."""
    merged: dict[int, TokenChunk] = {}
    for chunk in chunks:
        before = merged.get(chunk.sample)
        if before is not None:
            token_ids, logprobs = before.token_ids + chunk.token_ids, before.logprobs + chunk.logprobs
            chunk = replace(chunk, token_ids=token_ids, logprobs=logprobs, top=before.top + chunk.top)
        merged[chunk.sample] = chunk
    return list(merged.values())


class TokenStream(Protocol):
    """The samples of one request."""

    def read(self, timeout_s: float) -> list[TokenChunk]:
        """What has come, or comes first within the time. `BackendUnavailable` where it failed."""
        ...

    def cancel(self, sample: int | None = None) -> None:
        """One sample, or all of them, are not wanted any more."""
        ...


class Backend(Protocol):
    def submit(self, request: GenerationRequest) -> TokenStream: ...
