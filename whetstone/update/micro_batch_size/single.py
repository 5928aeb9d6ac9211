"""Search the micro-batch size in one process by running out of memory.

Memory grows linearly with tokens, so two measurements predict a third. Where too few tokens fit, as few
layers as possible get activation checkpointing.
"""

import math
from collections.abc import Callable

import torch

from whetstone.model.memory import MemoryProbe
from whetstone.model.policy import Policy
from whetstone.update.micro_batch_size.sizes import MIN_TOKENS, MicroBatchSize, SizeBounds

MEMORY_FRACTION = 0.92  # of the free memory; the rest is for fragmentation


class SizeSearch:
    """`run_tokens(tokens)` runs one forward and backward pass of a synthetic batch."""

    def __init__(
        self, policy: Policy, run_tokens: Callable[[int], None], bounds: SizeBounds, probe: MemoryProbe
    ):
        self.policy, self.run_tokens, self.bounds, self.probe = policy, run_tokens, bounds, probe

    def find(self, *, allow_checkpointing: bool) -> MicroBatchSize:
        """The largest size that fits; below the target, the fewest checkpointed layers that reach it."""
        self._peak(MIN_TOKENS)  # compiles, and allocates what is allocated once
        peaks = self._measure()
        size = MicroBatchSize(tokens=max(peaks, default=0))
        if allow_checkpointing and size.tokens < self.bounds.target_tokens:
            size = self._with_checkpointing(peaks)
        return size

    def _measure(self) -> dict[int, int]:
        """Tokens -> peak bytes of sizes that fit, the largest among them; empty if none does."""
        tokens, peaks = self.bounds.target_tokens, {}
        while (peak := self._peak(tokens)) is None:
            tokens //= 2
            if tokens < MIN_TOKENS:
                return {}
        peaks[tokens] = peak
        half = self._peak(tokens // 2)
        assert half is not None
        peaks[tokens // 2] = half
        predicted = LinearFit(peaks).tokens_for(MEMORY_FRACTION * self.probe.free())
        predicted = min(self.bounds.max_tokens, predicted)
        for larger in (predicted, (predicted + tokens) // 2):
            if larger > 1.1 * tokens and (peak := self._peak(larger)) is not None:
                peaks[larger] = peak
                break
        return peaks

    def _with_checkpointing(self, plain_peaks: dict[int, int]) -> MicroBatchSize:
        """Memory is linear in the number of checkpointed layers, too."""
        num_layers, target = len(self.policy.trunk.layers), self.bounds.target_tokens
        self.policy.checkpoint_layers(num_layers)
        peaks = self._measure()
        tokens = max(peaks, default=0)
        if tokens >= target and len(plain_peaks) > 1:
            plain = LinearFit(plain_peaks).bytes_for(target)
            excess = plain - MEMORY_FRACTION * self.probe.free()
            saved_per_layer = max(1.0, (plain - LinearFit(peaks).bytes_for(target)) / num_layers)
            for layers in range(max(1, math.ceil(excess / saved_per_layer)), num_layers):
                self.policy.checkpoint_layers(layers)
                if self._peak(target) is not None:
                    return MicroBatchSize(tokens=target, checkpointed_layers=layers)
            self.policy.checkpoint_layers(num_layers)
        return MicroBatchSize(tokens=tokens, checkpointed_layers=num_layers)

    def _peak(self, tokens: int) -> int | None:
        """Bytes that a pass allocates on top of those before; None if it runs out of memory."""
        try:
            return self.probe.peak_bytes(lambda: self.run_tokens(tokens))
        except torch.OutOfMemoryError:
            pass
        # Outside the handler: the exception holds references to the tensors of the failed pass.
        torch.cuda.empty_cache()
        return None


class LinearFit:
    """Bytes as a linear function of tokens, through the two largest points."""

    def __init__(self, peaks: dict[int, int]):
        less, more = sorted(peaks)[-2:]
        self.slope = max(1.0, (peaks[more] - peaks[less]) / (more - less))
        self.intercept = peaks[more] - self.slope * more

    def bytes_for(self, tokens: int) -> float:
        return self.intercept + self.slope * tokens

    def tokens_for(self, num_bytes: float) -> int:
        return max(0, int((num_bytes - self.intercept) / self.slope))
