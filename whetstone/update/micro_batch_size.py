"""Find the micro-batch size, tokens per pass, and how many layers need activation checkpointing."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from whetstone.errors import UserError
from whetstone.model.memory import MemoryProbe
from whetstone.model.policy import Policy
from whetstone.parallel.collectives import min_over_ranks
from whetstone.terminal.text import counted
from whetstone.types import Completion, Finish, Group, Rollout, Score, Turn
from whetstone.update.packing import Batch, Sample, pack

logger = logging.getLogger("whetstone")

DEFAULT_TOKENS = 8192  # on a CPU, where nothing is measured
MAX_TOKENS = 16384  # more is not faster: 16 k and 32 k take the same time on an H200 at 1.5 B
LORA_MAX_TOKENS = 32768  # of an adapter: thin products and small kernels take 4 % of the time less
TARGET_TOKENS = 8192  # below this, activation checkpointing pays
MIN_TOKENS = 256  # the smallest size that is tried
MEMORY_FRACTION = 0.92  # of the free memory; the rest is for fragmentation
SHARDED_MEMORY_FRACTION = 0.85  # less, since no trial may fail
MAX_EXCESS = 1.05  # of the free memory: assumed of a trial that runs out of it
MAX_GROWTH = 4  # largest ratio of tokens between two trials of sharded weights
MIN_GROWTH = 1.03  # smaller gains are not worth a trial


@dataclass
class MicroBatchSize:
    """`tokens` 0: not found yet."""

    tokens: int
    checkpointed_layers: int | None = None  # None: as configured

    def metrics(self) -> dict[str, float]:
        layers = self.checkpointed_layers
        checkpointing = {} if layers is None else {"checkpointed_layers": float(layers)}
        return {"micro_batch_tokens": float(self.tokens), **checkpointing}


@dataclass(frozen=True, kw_only=True)
class PlannedSize:
    """What should fit by arithmetic. `layer_bytes`: saved by the checkpointing of one more layer."""

    tokens: int
    checkpointed_layers: int | None = None  # None: as configured
    layer_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SizeBounds:
    """Tokens of the longest sequence, which can't be split, and of all that a rank runs in a step."""

    longest: int
    total: int
    uses_padding: bool = False  # attention pads: a short sequence takes as much memory as the longest
    limit: int = MAX_TOKENS

    @property
    def max_tokens(self) -> int:
        return max(self.longest, min(self.limit, self.total))

    @property
    def target_tokens(self) -> int:
        return max(self.longest, min(TARGET_TOKENS, self.total))


def find_size(
    policy: Policy,
    trial_step: Callable[[list[Batch]], None],
    groups: Sequence[Group],
    probe: MemoryProbe | None = None,
    *,
    allow_checkpointing: bool,
    planned: PlannedSize | None = None,
) -> MicroBatchSize:
    """The size for batches like `groups`, by trial steps whose memory `probe` measures; a collective call.

    `planned`: tried first where nothing is sharded.
    """
    if probe is None:
        if policy.device.type != "cuda":
            return MicroBatchSize(DEFAULT_TOKENS)
        probe = MemoryProbe(policy.device)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [rollout.num_tokens for rollout in rollouts]
    longest = max(rollout.longest_sequence for rollout in rollouts)
    prompt = max(len(rollout.prompt_ids) for rollout in rollouts)
    total = -(-sum(lengths) // policy.ranks.data_size)
    limit = LORA_MAX_TOKENS if policy.is_lora else MAX_TOKENS
    bounds = SizeBounds(longest=max(lengths), total=total, uses_padding=policy.uses_padding, limit=limit)

    def run_tokens(tokens: int) -> None:
        batch = synthetic_batch(tokens, longest=longest, prompt=prompt, vocab_size=policy.config.vocab_size)
        trial_step([batch, batch])  # twice: one micro-batch would need no gradient accumulators

    # FSDP does not recover from an interrupted pass, not even on one rank.
    kind = SizeSearch if policy.sharding is None else ShardedSizeSearch
    search = kind(policy, run_tokens, bounds, probe)
    size = search.find(allow_checkpointing=allow_checkpointing, planned=planned)
    if size.tokens < bounds.longest:
        raise UserError(
            f"One rollout of {bounds.longest:,} tokens does not fit into the GPU's memory: set "
            "gradient_checkpointing=auto, optim=adamw_8bit or cpu_offload=optimizer, or lower "
            "max_completion_length."
        )
    layers, num_layers = size.checkpointed_layers, len(policy.layers)
    detail = f", with activation checkpointing in {layers} of {num_layers} layers" if layers else ""
    tried = counted(search.num_trials, "size")
    logger.info(f"Micro-batches of {size.tokens:,} tokens fit{detail} ({tried} tried).")
    return size


def synthetic_batch(tokens: int, *, longest: int, prompt: int, vocab_size: int) -> Batch:
    """A batch of about `tokens` tokens: the longest sequences, mostly completion."""
    samples = []
    while tokens > 1:
        length = min(tokens, longest)
        prompt_length = max(1, min(prompt, length // 8))
        completion_length = max(1, length - prompt_length)
        # Different prompts, so that they are not shared.
        prompt_ids = tuple((len(samples) + n) % vocab_size for n in range(prompt_length))
        completion = Completion(
            token_ids=(1,) * completion_length,
            logprobs=(-1.0,) * completion_length,
            finish=Finish.LENGTH,
            policy_version=0,
        )
        rollout = Rollout(
            prompt_ids=prompt_ids,
            turns=(Turn(completion=completion),),
            text="",
            score=Score(reward=float(len(samples) % 2), parts={}, answer=None),
        )
        samples.append(Sample(rollout=rollout, index=len(samples), keep=True))
        tokens -= prompt_length + completion_length
    [batch] = pack(samples, 1 << 40)
    return batch


@dataclass
class _Search:
    policy: Policy
    run_tokens: Callable[[int], None]  # runs one forward and backward pass of a synthetic batch
    bounds: SizeBounds
    probe: MemoryProbe
    num_trials: int = -1  # the first only compiles


class SizeSearch(_Search):
    """Search in one process by running out of memory, which grows linearly with tokens and plain layers."""

    def find(self, *, allow_checkpointing: bool, planned: PlannedSize | None = None) -> MicroBatchSize:
        """The largest size that fits; below the target, the fewest checkpointed layers that reach it."""
        self._peak(MIN_TOKENS)  # compiles, and allocates what is allocated once
        if planned is not None and (size := self._near(planned)) is not None:
            return size
        peaks = self._measure()
        size = MicroBatchSize(tokens=max(peaks, default=0))
        if allow_checkpointing and size.tokens < self.bounds.target_tokens:
            size = self._with_checkpointing(peaks)
        return size

    def _near(self, planned: PlannedSize) -> MicroBatchSize | None:
        """The planned size, or after one trial a better one; None: neither fits."""
        tokens, layers = min(planned.tokens, self.bounds.max_tokens), planned.checkpointed_layers
        for _ in range(2):
            if layers is not None:
                self.policy.checkpoint_layers(layers)
            peak, limit = self._peak(tokens), MEMORY_FRACTION * self.probe.free()
            if peak is not None and peak <= limit:
                if layers is None:
                    tokens = self._larger(tokens, limit / max(1, peak))
                return MicroBatchSize(tokens=tokens, checkpointed_layers=layers)
            peak = peak or MAX_EXCESS * self.probe.free()  # out of memory: by how much is not known
            if layers is None:
                tokens = int(tokens * limit / peak)
                if tokens < self.bounds.target_tokens:
                    break
            else:
                more = math.ceil((peak - limit) / max(1.0, planned.layer_bytes))
                layers = min(len(self.policy.layers), layers + more)
        if layers is not None:
            self.policy.checkpoint_layers(0)
        return None

    def _larger(self, tokens: int, growth: float) -> int:
        """A size that should still fit, if it pays and does."""
        larger = min(self.bounds.max_tokens, int(tokens * growth))
        return larger if larger > 1.1 * tokens and self._peak(larger) is not None else tokens

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
        num_layers, target = len(self.policy.layers), self.bounds.target_tokens
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
        self.num_trials += 1
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


class ShardedSizeSearch(_Search):
    """Search with sharded weights: one size for all ranks, without running out of memory.

    A rank out of memory would leave the others waiting inside a layer. So each trial is scaled by the free
    memory of the fullest rank, assuming that memory grows linearly with tokens. It grows less, so no trial
    runs out.
    """

    def find(self, *, allow_checkpointing: bool, planned: PlannedSize | None = None) -> MicroBatchSize:
        """The largest size that fits on every rank; below the target, few checkpointed layers."""
        del planned  # a trial that is too large can't be survived
        smallest = min(MIN_TOKENS, self.bounds.max_tokens)
        self._measure(smallest)  # compiles, and allocates what is allocated once
        plain = self._grow(smallest, self.bounds.max_tokens)
        if not allow_checkpointing or plain.tokens >= self._target:
            return MicroBatchSize(tokens=plain.tokens)
        num_layers = len(self.policy.layers)
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
        self.num_trials += 1
        used = self.probe.peak_bytes(lambda: self.run_tokens(tokens))
        available = SHARDED_MEMORY_FRACTION * self.probe.free()
        headroom = min_over_ranks(self.policy.ranks, available / max(1, used))
        return Measurement(tokens=tokens, used=used, available=available, headroom=headroom)
