"""Masks and weights of completions and tokens in the policy loss. Pure; _S sequences, _N tokens."""

import math

import torch
from torch import Tensor

from whetstone.config.sections import LossConfig


def sequence_mean(values_N: Tensor, sequence_ids_N: Tensor, num_sequences: int) -> Tensor:
    """Mean of the token values of each sequence, [S]."""
    total_S = values_N.new_zeros(num_sequences).index_add(0, sequence_ids_N, values_N)
    count_S = torch.bincount(sequence_ids_N, minlength=num_sequences).clamp(min=1)
    return total_S / count_S


def off_policy_keep(advantages_S: Tensor, drift_S: Tensor, threshold: float) -> Tensor:
    """Drop sequences with negative advantage that have drifted by more than `threshold`: 1 kept, 0 dropped.

    `drift_S` is the mean over tokens of (logprob when sampled - logprob now). A bad sequence whose
    probability rose is kept, as in TRL.
    """
    return ((advantages_S >= 0) | (drift_S <= threshold)).to(drift_S.dtype)


def sampler_weights(
    difference_N: Tensor, sequence_ids_N: Tensor, num_sequences: int, config: LossConfig
) -> Tensor:
    """Importance weights [N] for what lies between the policy that sampled and the trainer's own.

    `difference_N` is logprob by the trainer - logprob by the sampler, before the first update. Per token or
    per sequence (the product of its tokens'); bounded ("truncate") or left out altogether ("mask") beyond the
    bounds.
    """
    level, _, treatment = config.importance_correction.partition("_")
    if level == "sequence":
        total_S = difference_N.new_zeros(num_sequences).index_add(0, sequence_ids_N, difference_N)
        difference_N = total_S[sequence_ids_N]
    weights = torch.exp(difference_N)
    low, high = config.importance_correction_min, config.importance_correction_max
    if treatment == "truncate":
        return weights.clamp(low, high)
    return weights.masked_fill((weights < low) | (weights > high), 0.0)


def entropy_threshold(entropy_N: Tensor, fraction: float) -> Tensor:
    """The least entropy among this fraction of tokens, those of the highest; 0 where there are no tokens.

    The mask is that of torch.quantile(entropy, 1 - fraction), which takes 2^24 numbers at most.
    """
    if not len(entropy_N):
        return entropy_N.new_zeros(())
    return entropy_N.sort().values[-1 - math.floor(fraction * (len(entropy_N) - 1) + 1e-6)]


def high_entropy(entropy_N: Tensor, threshold: Tensor) -> Tensor:
    """1 for tokens at least as undecided as `threshold`, 0 for the others."""
    return (entropy_N >= threshold).to(entropy_N.dtype)
