"""Estimators of the KL divergence of the policy from a reference, per sampled token. Pure functions.

With d = log p - log q (policy, reference) and tokens sampled from the policy, all three have the KL
divergence near their mean: k1 = d exactly, but noisy and of either sign; k2 = d^2 / 2 nearly, never negative;
k3 = exp(-d) + d - 1 exactly, never negative. As part of a loss only the gradient matters: that of k2 is the
KL's, that of k1 is 0 on average.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    return (logprobs - reference).square() / 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    difference = reference - logprobs
    return torch.exp(difference) - difference - 1


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
