"""Estimators of the KL divergence from a reference, per token. Pure functions of tensors."""

import torch
from torch import Tensor


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = reference - policy: unbiased, never negative (Schulman's k3)."""
    difference = reference - logprobs
    return torch.exp(difference) - difference - 1
