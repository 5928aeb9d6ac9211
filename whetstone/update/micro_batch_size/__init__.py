"""Find the micro-batch size: tokens per forward and backward pass, and layers with activation checkpointing.

On a GPU synthetic batches are run: in one process until memory runs out (single.py), on several ranks without
running out (multi_rank.py). On a CPU the size is a constant. The updater handles out of memory during a run.
"""

import logging
from collections.abc import Callable, Sequence

from whetstone.errors import UserError
from whetstone.model.memory import MemoryProbe
from whetstone.model.policy import Policy
from whetstone.types import Completion, Finish, Group, Rollout, Score
from whetstone.update.micro_batch_size.multi_rank import MultiRankSizeSearch
from whetstone.update.micro_batch_size.single import SizeSearch
from whetstone.update.micro_batch_size.sizes import DEFAULT_TOKENS, MicroBatchSize, SizeBounds
from whetstone.update.packing import Batch, Sample, pack

logger = logging.getLogger("whetstone")


def find_size(
    policy: Policy,
    trial_step: Callable[[list[Batch]], None],
    groups: Sequence[Group],
    *,
    allow_checkpointing: bool,
) -> MicroBatchSize:
    """The size for batches like `groups`; a collective call."""
    if policy.device.type != "cuda":
        return MicroBatchSize(DEFAULT_TOKENS)
    probe = MemoryProbe(policy.device)
    size = search_size(policy, trial_step, groups, probe, allow_checkpointing=allow_checkpointing)
    text = f"Micro-batches of {size.tokens:,} tokens fit"
    if size.checkpointed_layers:
        text += f", with activation checkpointing in {size.checkpointed_layers} of {len(policy.trunk.layers)}"
        text += " layers"
    logger.info(text + ".")
    return size


def search_size(
    policy: Policy,
    trial_step: Callable[[list[Batch]], None],
    groups: Sequence[Group],
    probe: MemoryProbe,
    *,
    allow_checkpointing: bool,
) -> MicroBatchSize:
    """The size by trial steps whose memory `probe` measures."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [len(rollout.prompt_ids) + len(rollout.completion.token_ids) for rollout in rollouts]
    prompt = max(len(rollout.prompt_ids) for rollout in rollouts)
    total = -(-sum(lengths) // policy.ranks.data_size)
    bounds = SizeBounds(longest=max(lengths), total=total, uses_padding=policy.uses_padding)

    def run_tokens(tokens: int) -> None:
        batch = synthetic_batch(
            tokens, longest=bounds.longest, prompt=prompt, vocab_size=policy.config.vocab_size
        )
        trial_step([batch, batch])  # twice: one micro-batch would need no gradient accumulators

    # FSDP does not recover from an interrupted pass, not even on one rank.
    search = SizeSearch if policy.sharding is None else MultiRankSizeSearch
    size = search(policy, run_tokens, bounds, probe).find(allow_checkpointing=allow_checkpointing)
    if size.tokens < bounds.longest:
        raise UserError(
            f"One sequence of {bounds.longest:,} tokens does not fit into the GPU's memory beside the "
            "model and its optimizer: set gradient_checkpointing=auto, optim=adamw_8bit, "
            "cpu_offload=optimizer, or lower max_completion_length."
        )
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
            completion=completion,
            text="",
            score=Score(reward=float(len(samples) % 2), parts={}, answer=None),
        )
        samples.append(Sample(rollout=rollout, index=len(samples), keep=True))
        tokens -= prompt_length + completion_length
    [batch] = pack(samples, 1 << 40)
    return batch
