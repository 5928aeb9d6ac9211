"""The policy losses, per token and unreduced. Pure: tensors and configuration in, tensors out.

`policy_loss` reads LossInputs and returns LossOutputs; `reduce.py` has weighted each token beforehand, so the
loss of a step is the plain sum of weight x token loss, whatever the micro-batches. All tensors are [N], one
entry per completion token. A new loss is a function of (ratio, inputs, config) and a record in `LOSSES`; its
name goes into `loss_type` of config/loss.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from whetstone.algorithm.kl import ESTIMATORS
from whetstone.algorithm.masks import sequence_mean
from whetstone.config.sections import LossConfig


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    logprobs: Tensor  # of the policy now; carries the gradient
    old_logprobs: Tensor  # of the policy before this batch's first update
    advantages: Tensor
    sequence: Tensor  # which completion a token belongs to
    num_sequences: int
    reference_logprobs: Tensor | None  # None without a KL in the loss, and where it is given whole
    full_kl: Tensor | None  # over the whole vocabulary, with gradient
    factor: Tensor | None  # what masks and importance weights leave of the policy loss; None: all of it


@dataclass(frozen=True, kw_only=True)
class LossOutputs:
    loss: Tensor  # unreduced, with gradient
    clipped: Tensor  # 1.0 where the clip took the gradient away or bounded its weight
    kl: Tensor | None


def policy_loss(inputs: LossInputs, config: LossConfig, *, beta: float) -> LossOutputs:
    """The surrogate of `loss_type` plus beta x KL."""
    ratio = importance_ratio(inputs, ratio_level(config))
    loss, clipped = LOSSES[config.loss_type].surrogate(ratio, inputs, config)
    if inputs.factor is not None:
        loss = loss * inputs.factor  # before the KL, which holds dropped sequences too (as in TRL)
    kl = inputs.full_kl
    if inputs.reference_logprobs is not None:
        kl = ESTIMATORS[config.kl_estimator](inputs.logprobs, inputs.reference_logprobs)
        if config.use_bias_correction_kl:
            kl = kl * ratio
    if kl is not None:
        loss = loss + beta * kl
    return LossOutputs(loss=loss, clipped=clipped.to(ratio.dtype), kl=None if kl is None else kl.detach())


def ratio_level(config: LossConfig) -> str:
    """`token` or `sequence`: what the loss demands, else importance_sampling_level."""
    return LOSSES[config.loss_type].ratio or config.importance_sampling_level


def importance_ratio(inputs: LossInputs, level: str) -> Tensor:
    """Probability now over probability before: of each token, or the geometric mean over its sequence."""
    log_ratio = inputs.logprobs - inputs.old_logprobs
    if level == "sequence":
        means = sequence_mean(log_ratio, inputs.sequence, inputs.num_sequences)
        log_ratio = means.index_select(0, inputs.sequence)
    return torch.exp(log_ratio)


def clipped_surrogate(ratio: Tensor, inputs: LossInputs, config: LossConfig) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A), with r at most `delta` where that is set (PPO)."""
    low, high = 1 - config.epsilon, 1 + config.upper_epsilon
    advantages = inputs.advantages
    bounded = ratio if config.delta is None else ratio.clamp(max=config.delta)
    loss = -torch.minimum(bounded * advantages, ratio.clamp(low, high) * advantages)
    clipped = ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))
    return loss, clipped


def cispo(ratio: Tensor, inputs: LossInputs, config: LossConfig) -> tuple[Tensor, Tensor]:
    """-min(r, epsilon_high) A log p with the weight held fixed: a clipped token keeps its gradient
    (MiniMax-M1).
    """
    weight = ratio.detach().clamp(max=config.upper_epsilon)
    return -weight * inputs.advantages * inputs.logprobs, (ratio > config.upper_epsilon) & (
        inputs.advantages > 0
    )


def sapo(ratio: Tensor, inputs: LossInputs, config: LossConfig) -> tuple[Tensor, Tensor]:
    """-(4 / t) sigmoid(t (r - 1)) A: a gate that closes softly, at another temperature t for bad answers."""
    good, bad = ratio.new_tensor(config.sapo_temperature_pos), ratio.new_tensor(config.sapo_temperature_neg)
    temperature = torch.where(inputs.advantages > 0, good, bad)
    gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
    return -gate * inputs.advantages, torch.zeros_like(ratio)


def reinforce(ratio: Tensor, inputs: LossInputs, config: LossConfig) -> tuple[Tensor, Tensor]:
    """-A log p: no ratio, no clip; right where each batch is used once."""
    return -inputs.advantages * inputs.logprobs, torch.zeros_like(ratio)


@dataclass(frozen=True, kw_only=True)
class Loss:
    """One policy loss: all that depends on its name."""

    # (ratio, inputs, config) -> loss per token, and where the clip took the gradient away
    surrogate: Callable[[Tensor, LossInputs, LossConfig], tuple[Tensor, Tensor]]
    # Mean over the tokens of a sequence and then over sequences; mean over all tokens of the step; or the sum
    # over tokens divided by sequences x max_completion_length.
    average: Literal["sequence", "token", "constant"]
    ratio: Literal["token", "sequence"] | None = None  # None: importance_sampling_level decides


LOSSES: dict[str, Loss] = {
    "grpo": Loss(surrogate=clipped_surrogate, average="sequence"),
    "bnpo": Loss(surrogate=clipped_surrogate, average="token"),
    "dr_grpo": Loss(surrogate=clipped_surrogate, average="constant"),
    "dapo": Loss(surrogate=clipped_surrogate, average="token"),
    "gspo": Loss(surrogate=clipped_surrogate, average="sequence", ratio="sequence"),
    "cispo": Loss(surrogate=cispo, average="token"),
    "sapo": Loss(surrogate=sapo, average="sequence"),
    "reinforce": Loss(surrogate=reinforce, average="token"),
}
