"""Which completions take part in the loss. Pure functions of tensors; _S sequences, _N completion tokens."""

import torch
from torch import Tensor


def sequence_mean(values_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """Mean of the token values of each sequence, [S]."""
    total_S = torch.zeros(num_sequences, dtype=values_N.dtype, device=values_N.device).index_add(
        0, sequence_N, values_N
    )
    count_S = torch.bincount(sequence_N, minlength=num_sequences).clamp(min=1)
    return total_S / count_S


def off_policy_keep(advantages_S: Tensor, drift_S: Tensor, threshold: float) -> Tensor:
    """TRL's rule: drop sequences with negative advantage whose mean logprob fell by more than `threshold`.

    `drift_S` is the mean over tokens of (logprob when sampled - logprob now). Returns 1 where kept, 0 where
    dropped.
    """
    return ((advantages_S >= 0) | (drift_S <= threshold)).to(drift_S.dtype)
