"""How many tokens go through one forward and backward pass, and how many layers are run again in between.

On a GPU it is found by running made-up batches, from which nothing is learnt: by a process alone until memory
runs out (alone.py), by several ranks in step and without running out (agreed.py). Elsewhere `auto` is a fixed
number and no layer is run again. Memory that runs out in mid-run is update.py's business.
"""

import logging
from collections.abc import Callable, Sequence

from whetstone.errors import UserError
from whetstone.model.memory import Gauge
from whetstone.model.policy import Policy
from whetstone.types import Completion, Finish, Group, Rollout, Score
from whetstone.update.micro_batch_size.multi_rank import AgreedFinder
from whetstone.update.micro_batch_size.single import Finder
from whetstone.update.micro_batch_size.sizes import UNTRIED, Budget, Sizes
from whetstone.update.packing import Batch, Sample, pack

logger = logging.getLogger("whetstone")


def find(
    policy: Policy, attempt: Callable[[list[Batch]], None], groups: Sequence[Group], *, may_run_again: bool
) -> Budget:
    """The budget for batches such as `groups`; all ranks must call it alike."""
    if policy.device.type != "cuda":
        return Budget(UNTRIED)
    budget = search(policy, attempt, groups, Gauge(policy.device), may_run_again=may_run_again)
    text = f"Micro-batches of {budget.tokens:,} tokens fit"
    if budget.layers_run_again:
        layers = f"{budget.layers_run_again} of {len(policy.trunk.layers)} layers"
        text += f", with {layers} run again in the backward pass"
    logger.info(text + ".")
    return budget


def search(
    policy: Policy,
    attempt: Callable[[list[Batch]], None],
    groups: Sequence[Group],
    gauge: Gauge,
    *,
    may_run_again: bool,
) -> Budget:
    """The same by passes whose memory `gauge` measures."""
    samples = [rollout for group in groups for rollout in group.rollouts]
    lengths = [len(one.prompt_ids) + len(one.completion.token_ids) for one in samples]
    prompt = max(len(one.prompt_ids) for one in samples)
    wanted = -(-sum(lengths) // policy.ranks.data_size)
    sizes = Sizes(longest=max(lengths), wanted=wanted, pads=policy.pads)

    def attempt_tokens(tokens: int) -> None:
        words = policy.config.vocab_size
        batch = made_up(tokens, longest=sizes.longest, prompt=prompt, vocabulary=words)
        attempt([batch, batch])  # twice: a single one would not need its gradients summed

    # FSDP does not get over a pass that broke off, on one rank neither.
    kind = Finder if policy.spread is None else AgreedFinder
    budget = kind(policy, attempt_tokens, sizes, gauge).find(may_run_again=may_run_again)
    if budget.tokens < sizes.longest:
        raise UserError(
            f"One sequence of {sizes.longest:,} tokens does not fit into the GPU's memory beside the "
            "model and its optimiser: set gradient_checkpointing=auto, optim=adamw_8bit, "
            "cpu_offload=optimizer, or lower max_completion_length."
        )
    return budget


def made_up(tokens: int, *, longest: int, prompt: int, vocabulary: int) -> Batch:
    """A batch of about so many tokens: sequences as long as they come, nearly all of it completions."""
    samples = []
    while tokens > 1:
        length = min(tokens, longest)
        head = max(1, min(prompt, length // 8))
        count = max(1, length - head)
        # Different prompts, or they would be shared.
        ids = tuple((len(samples) + n) % vocabulary for n in range(head))
        completion = Completion(
            token_ids=(1,) * count, logprobs=(-1.0,) * count, finish=Finish.LENGTH, policy_version=0
        )
        rollout = Rollout(
            prompt_ids=ids,
            completion=completion,
            text="",
            score=Score(reward=float(len(samples) % 2), parts={}, answer=None),
        )
        samples.append(Sample(rollout=rollout, place=len(samples), keep=True))
        tokens -= head + count
    [batch] = pack(samples, 1 << 40)
    return batch
