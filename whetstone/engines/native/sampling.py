"""What the native engines on a CPU and on a GPU have in common: closed, open and streamed sampling."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from whetstone.engines.base import (
    EngineBase,
    GenerationOutput,
    PartialOutput,
    Request,
    RequestStream,
    SamplingParams,
)
from whetstone.engines.native.slot_state import CacheShape
from whetstone.model.adapters import selection_of
from whetstone.model.policy import Policy


class SamplingEngine(EngineBase, ABC):
    """`max_slots`: sequences that are sampled at once."""

    def __init__(self, policy: Policy, shape: CacheShape, max_slots: int):
        super().__init__(policy)
        self.shape, self.max_slots = shape, max_slots
        self.adapters = selection_of(policy.model)

    def generate(self, requests: list[Request], sampling: SamplingParams) -> Iterator[GenerationOutput]:
        outputs = self._outputs(requests, sampling)
        return (output for output in outputs if isinstance(output, GenerationOutput))

    def generate_open(
        self, requests: list[Request], sampling: SamplingParams, stream: RequestStream
    ) -> Iterator[GenerationOutput]:
        outputs = self._outputs(requests, sampling, stream)
        return (output for output in outputs if isinstance(output, GenerationOutput))

    def stream(
        self, requests: list[Request], sampling: SamplingParams, stream: RequestStream | None = None
    ) -> Iterator[GenerationOutput | PartialOutput]:
        """`generate` (or `generate_open`), and after each step or round every unfinished sample."""
        return self._outputs(requests, sampling, stream, with_partial=True)

    @abstractmethod
    def _outputs(
        self,
        requests: list[Request],
        sampling: SamplingParams,
        stream: RequestStream | None = None,
        *,
        with_partial: bool = False,
    ) -> Iterator[GenerationOutput | PartialOutput]:
        """Finished samples, and `with_partial` the unfinished ones after each step or round."""
