"""Sampling on a CPU: logits -> the next token of every sequence and its logprob.

One uniform number per token, through the cumulative distribution: a sample depends on its own seed and
logits, not on its batch. Temperature 0 is greedy, with the logprobs of temperature 1 and no filters.
"""

import torch
from torch import Tensor

from whetstone.engines.base import SamplingParams


def sample(logits: Tensor, uniform: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """[B, V] logits and [B] uniform numbers -> ([B] tokens, [B] logprobs)."""
    logits = logits.float()
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, logits.log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
    logprobs = (logits / sampling.temperature).log_softmax(-1)
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0:
        logprobs = _filter(logprobs, sampling).log_softmax(-1)
    cumulative = logprobs.exp().cumsum(-1)
    total = cumulative[:, -1:]
    # Strictly below the total, so that a token without probability is never reached.
    threshold = torch.minimum(
        uniform.to(total.dtype)[:, None] * total, torch.nextafter(total, torch.zeros_like(total))
    )
    tokens = torch.searchsorted(cumulative, threshold, right=True)
    return tokens.squeeze(-1), logprobs.gather(-1, tokens).squeeze(-1)


def _filter(logprobs: Tensor, sampling: SamplingParams) -> Tensor:
    """-inf for tokens that top-k, top-p or min-p remove; the likeliest token and ties with the last stay."""
    ordered = logprobs.sort(-1, descending=True).values
    drop = torch.zeros_like(ordered, dtype=torch.bool)
    if sampling.top_k:
        drop[:, sampling.top_k :] = True
    if sampling.min_p > 0:
        drop |= ordered.exp() < sampling.min_p * ordered[:, :1].exp()
    if sampling.top_p < 1:
        # Filters work one after the other, as in transformers: top-p counts within what the others left.
        probabilities = ordered.masked_fill(drop, float("-inf")).softmax(-1)
        drop |= probabilities.cumsum(-1) - probabilities >= sampling.top_p
    drop[:, 0] = False
    lowest = ordered.masked_fill(drop, float("inf")).amin(-1, keepdim=True)
    return logprobs.masked_fill(logprobs < lowest, float("-inf"))
