"""Logprob and entropy of chosen tokens from hidden states, without keeping the logits of all tokens at once.

Rows go through the output head in chunks; where all logits would not fit a budget, each chunk is recomputed
in the backward pass. Only rows that predict a completion token come here: prompts never meet the vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGITS_BUDGET = 1 << 26  # numbers of logits held at once: 256 MB in float32


class TokenStatistics(NamedTuple):
    """Of each of N tokens, with gradients."""

    logprobs: Tensor
    entropy: Tensor
    full_kl: Tensor | None  # from `reference`, over the whole vocabulary


def token_statistics(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    reference: Tensor | None = None,
) -> TokenStatistics:
    """Logprob of each target and entropy at `temperature`, in float32 or better.

    `reference` [N, V] are all logprobs of another policy, which the KL divergence is taken from.
    """

    def chunk(
        hidden: Tensor, targets: Tensor, reference: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        logprobs = all_logprobs(head, hidden, temperature)
        probabilities = logprobs.exp()
        chosen = logprobs.gather(-1, targets[:, None]).squeeze(-1)
        entropy = -(probabilities * logprobs).sum(-1)
        full = None if reference is None else (probabilities * (logprobs - reference)).sum(-1)
        return chosen, entropy, full

    rows = max(1, LOGITS_BUDGET // _vocabulary(head, hidden))
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
    return TokenStatistics(
        torch.cat(chosen), torch.cat(entropy), None if reference is None else torch.cat(full)
    )


def all_logprobs(head: Callable[[Tensor], Tensor], hidden: Tensor, temperature: float) -> Tensor:
    """[N, V] logprobs of every token of the vocabulary."""
    logits = head(hidden)
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    return (logits / temperature).log_softmax(-1)


def _vocabulary(head: Callable[[Tensor], Tensor], hidden: Tensor) -> int:
    with torch.no_grad():
        return head(hidden[:1]).shape[-1]
