"""Logprob and entropy of chosen tokens from hidden states, without keeping the logits of all tokens at once.

Hidden states of completion tokens go through the output head in chunks. Where all logits would exceed a
budget, each chunk is recomputed in the backward pass. fused_head.py is faster on a GPU for plain heads.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from whetstone.model.fused_head import Head, fused_statistics
from whetstone.model.memory import usable_memory
from whetstone.parallel.tensor import ShardedLogits, Statistics

LOGITS_BUDGET = 1 << 26  # numbers of logits held at once: 256 MB in float32
FUSED_BYTES = 1 << 30  # of logits held at once on a GPU: fewer and larger products, fewer sums of gradients
FUSED_SHARE = 1 / 32  # but at most so much of its memory


class TokenStatistics(NamedTuple):
    """Of each of N tokens, with gradients."""

    logprobs: Tensor
    entropy: Tensor
    full_kl: Tensor | None  # from `reference`, over the whole vocabulary


class UnshardedLogits:
    """Statistics of logits [N, V] that are all on this rank (`ShardedLogits`: a slice of the vocabulary)."""

    def statistics(self, logits: Tensor, targets: Tensor, reference: Tensor | None) -> Statistics:
        """Logprob of each target, entropy, and KL divergence from `reference`."""
        logprobs = logits.log_softmax(-1)
        probabilities = logprobs.exp()
        chosen = logprobs.gather(-1, targets[:, None]).squeeze(-1)
        entropy = -(probabilities * logprobs).sum(-1)
        full = None if reference is None else (probabilities * (logprobs - reference)).sum(-1)
        return chosen, entropy, full

    def logprobs(self, logits: Tensor) -> Tensor:
        return logits.log_softmax(-1)

    def width(self, logits: Tensor) -> int:
        """The largest V of any rank: all must cut their rows alike."""
        return logits.shape[-1]

    def gather(self, logits: Tensor) -> Tensor:
        """The logits of the whole vocabulary."""
        return logits


LogitsLayout = UnshardedLogits | ShardedLogits
UNSHARDED = UnshardedLogits()


def token_statistics(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    reference: Tensor | None = None,
    logits_layout: LogitsLayout = UNSHARDED,
    plain_head: Head | None = None,
    needs_entropy_gradient: bool = True,
) -> TokenStatistics:
    """Logprob of each target and entropy at `temperature`, in float32 or better.

    `reference` [N, V]: logprobs of the reference policy, for the full KL. `plain_head`: for kernels.
    Where the gradient of the entropy is not needed, the entropy may have none.
    """
    if plain_head is not None and reference is None and hidden.is_cuda:
        size = plain_head.weight.element_size() * len(plain_head.weight)
        rows = int(min(FUSED_BYTES, FUSED_SHARE * usable_memory(hidden.device))) // size
        logprobs, entropy = fused_statistics(
            hidden, targets, plain_head, max(1, rows), needs_entropy_gradient=needs_entropy_gradient
        )
        return TokenStatistics(logprobs, entropy, None)

    def chunk(hidden: Tensor, targets: Tensor, reference: Tensor | None) -> Statistics:
        return logits_layout.statistics(scale_logits(head(hidden), temperature), targets, reference)

    with torch.no_grad():
        width = logits_layout.width(head(hidden[:1]))
    rows = max(1, LOGITS_BUDGET // width)
    if len(targets) <= rows:
        return TokenStatistics(*chunk(hidden, targets, reference))
    parts = [
        checkpoint(
            chunk,
            hidden[start : start + rows],
            targets[start : start + rows],
            None if reference is None else reference[start : start + rows],
            use_reentrant=False,
        )
        for start in range(0, len(targets), rows)
    ]
    chosen, entropy, full = zip(*parts, strict=True)
    full_kl = None if reference is None else torch.cat(full)
    return TokenStatistics(torch.cat(chosen), torch.cat(entropy), full_kl)


def scale_logits(logits: Tensor, temperature: float) -> Tensor:
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    return logits / temperature
