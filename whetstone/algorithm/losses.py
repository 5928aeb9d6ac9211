"""The policy losses, per token and unreduced. Pure: tensors and configuration in, tensors out.

`policy_loss` reads LossInputs and returns LossOutputs; `reduce.py` has weighted each token beforehand, so the
loss of a step is the plain sum of weight x token loss, whatever the micro-batches. All tensors are [N], one
entry per completion token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from whetstone.algorithm.kl import k3
from whetstone.config.rooms import LossRoom


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    logprobs: Tensor  # of the policy now; carries the gradient
    old_logprobs: Tensor  # of the policy before this batch's first update
    advantages: Tensor
    entropy: Tensor
    reference_logprobs: Tensor | None  # None where beta is 0
    keep: Tensor | None  # 0 where the off-policy mask drops a token's policy loss; None: no mask


@dataclass(frozen=True, kw_only=True)
class LossOutputs:
    loss: Tensor  # unreduced, with gradient
    clipped: Tensor  # 1.0 where the clip took the gradient away
    kl: Tensor | None


def policy_loss(inputs: LossInputs, config: LossRoom) -> LossOutputs:
    """Clipped policy gradient (PPO's, as GRPO uses it) plus beta x KL minus entropy_coef x entropy."""
    low, high = (
        1 - config.epsilon,
        1 + (config.epsilon if config.epsilon_high is None else config.epsilon_high),
    )
    advantages = inputs.advantages
    ratio = torch.exp(inputs.logprobs - inputs.old_logprobs)
    bounded = ratio if config.delta is None else ratio.clamp(max=config.delta)
    loss = -torch.minimum(bounded * advantages, ratio.clamp(low, high) * advantages)
    if inputs.keep is not None:
        loss = loss * inputs.keep  # before the KL, which holds dropped sequences too (as in TRL)
    with torch.no_grad():
        clipped = ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))
    kl = None
    if inputs.reference_logprobs is not None:
        kl = k3(inputs.logprobs, inputs.reference_logprobs)
        loss = loss + config.beta * kl
    if config.entropy_coef:
        loss = loss - config.entropy_coef * inputs.entropy
    return LossOutputs(loss=loss, clipped=clipped.to(ratio.dtype), kl=None if kl is None else kl.detach())
