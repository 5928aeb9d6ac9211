"""Logprob and entropy of chosen tokens from hidden states, without keeping the logits of all tokens at once.

Rows go through the output head in chunks; where all logits would not fit a budget, each chunk is recomputed
in the backward pass. Only rows that predict a completion token come here: prompts never meet the vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGITS_BUDGET = 1 << 26  # numbers of logits held at once: 256 MB in float32


def token_logprobs(
    head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, *, temperature: float, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """([N] logprob of each target, [N] entropy) at `temperature`, in float32 or better; both carry
    gradients.
    """

    def chunk(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(hidden)
        logits = (logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits) / temperature
        normaliser = logits.logsumexp(-1)
        logprob = logits.gather(-1, targets[:, None]).squeeze(-1) - normaliser
        mean_logit = (torch.exp(logits - normaliser[:, None]) * logits).sum(-1)
        return logprob, normaliser - mean_logit

    rows = max(1, LOGITS_BUDGET // vocab_size)
    if len(targets) <= rows:
        return chunk(hidden, targets)
    parts = [
        checkpoint(chunk, hidden[start : start + rows], targets[start : start + rows], use_reentrant=False)
        for start in range(0, len(targets), rows)
    ]
    return torch.cat([logprob for logprob, _ in parts]), torch.cat([entropy for _, entropy in parts])
