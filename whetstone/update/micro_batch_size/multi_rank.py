"""Search the micro-batch size of sharded weights: one size for all ranks, without running out of memory.

A rank out of memory would leave the others waiting inside a layer. So each trial is scaled by the free memory
of the fullest rank, assuming that memory grows linearly with tokens. It grows less, so no trial runs out.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from whetstone.model.memory import MemoryProbe
from whetstone.model.policy import Policy
from whetstone.parallel.collectives import min_over_ranks
from whetstone.update.micro_batch_size.sizes import MIN_TOKENS, MicroBatchSize, SizeBounds

MEMORY_FRACTION = 0.85  # of the free memory: less than in one process, where a trial may fail
MAX_GROWTH = 4  # largest ratio of tokens between two trials
MIN_GROWTH = 1.03  # smaller gains are not worth a trial


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A trial: bytes that it allocated and could have allocated on this rank."""

    tokens: int
    used: float
    available: float
    headroom: float  # available / used, the minimum over ranks


def next_size(trial: Measurement, bounds: SizeBounds, max_tokens: int) -> int:
    """Tokens of the next trial, which fits; unchanged where there is no memory for more."""
    tokens = trial.tokens
    growth = min(trial.headroom, MAX_GROWTH)
    if tokens < bounds.longest:  # one sequence: attention may be quadratic in its length
        return min(max_tokens, bounds.longest, max(tokens, int(tokens * math.sqrt(growth))))
    size = min(max_tokens, int(tokens * growth))
    padded = -(-size // bounds.longest) * bounds.longest
    if bounds.uses_padding and padded > tokens * growth:
        size -= size % bounds.longest
    return max(tokens, size)


def layers_without_checkpointing(
    plain: Measurement, checkpointed: Measurement, bounds: SizeBounds, num_layers: int
) -> int:
    """How many layers can keep their activations at `checkpointed.tokens` on this rank.

    Bytes lie below the straight line from no layer to all, being the maximum of several sums. Without
    checkpointing they are at most proportional to tokens.
    """
    growth = checkpointed.tokens / plain.tokens
    plain_bytes = plain.used * growth ** (2 if plain.tokens < bounds.longest else 1)
    per_layer = (plain_bytes - checkpointed.used) / num_layers
    spare = checkpointed.available - checkpointed.used
    if spare <= 0:
        return 0
    return num_layers if per_layer <= 0 else min(num_layers, int(spare / per_layer))


class MultiRankSizeSearch:
    """`run_tokens(tokens)` runs one forward and backward pass on all ranks."""

    def __init__(
        self, policy: Policy, run_tokens: Callable[[int], None], bounds: SizeBounds, probe: MemoryProbe
    ):
        self.policy, self.run_tokens, self.bounds, self.probe = policy, run_tokens, bounds, probe

    def find(self, *, allow_checkpointing: bool) -> MicroBatchSize:
        """The largest size that fits on every rank; below the target, few checkpointed layers."""
        smallest = min(MIN_TOKENS, self.bounds.max_tokens)
        self._measure(smallest)  # compiles, and allocates what is allocated once
        plain = self._grow(smallest, self.bounds.max_tokens)
        if not allow_checkpointing or plain.tokens >= self._target:
            return MicroBatchSize(tokens=plain.tokens)
        num_layers = len(self.policy.trunk.layers)
        self.policy.checkpoint_layers(num_layers)
        checkpointed = self._grow(plain.tokens, self._target)
        if checkpointed.tokens < self._target:
            return MicroBatchSize(tokens=checkpointed.tokens, checkpointed_layers=num_layers)
        local = layers_without_checkpointing(plain, checkpointed, self.bounds, num_layers)
        num_plain = int(min_over_ranks(self.policy.ranks, local))
        while num_plain:
            self.policy.checkpoint_layers(num_layers - num_plain)
            if self._measure(checkpointed.tokens).headroom >= 1:
                break
            num_plain //= 2
        self.policy.checkpoint_layers(num_layers - num_plain)
        return MicroBatchSize(tokens=checkpointed.tokens, checkpointed_layers=num_layers - num_plain)

    @property
    def _target(self) -> int:
        target, longest = self.bounds.target_tokens, self.bounds.longest
        return target // longest * longest if self.bounds.uses_padding else target

    def _grow(self, tokens: int, max_tokens: int) -> Measurement:
        """Trials from `tokens` on, until no larger one fits or pays; the last of them."""
        trial = self._measure(tokens)
        while True:
            size = next_size(trial, self.bounds, max_tokens)
            is_bound = trial.tokens < size and size in (max_tokens, self.bounds.longest)
            if size < MIN_GROWTH * trial.tokens and not is_bound:
                return trial
            trial = self._measure(size)

    def _measure(self, tokens: int) -> Measurement:
        used = self.probe.peak_bytes(lambda: self.run_tokens(tokens))
        available = MEMORY_FRACTION * self.probe.free()
        headroom = min_over_ranks(self.policy.ranks, available / max(1, used))
        return Measurement(tokens=tokens, used=used, available=available, headroom=headroom)
