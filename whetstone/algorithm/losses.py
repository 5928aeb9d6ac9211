"""The policy losses, per token and unreduced. Pure: tensors and configuration in, tensors out.

A loss is a function of `LossInputs` and the configuration that returns `LossOutputs`. `reduce.py` weighs the
tokens beforehand, so the loss of a step is the sum of weight x token loss, whatever the micro-batches. All
tensors are [N], one entry per completion token. To add a loss, write its function here and its record in
config/losses.py. `loss_type: my_loss.py:function` uses a function of the user's own.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whetstone.algorithm.masks import sequence_mean
from whetstone.config.losses import AVERAGES, LOSSES, RATIO_LEVELS, Loss
from whetstone.config.plugins import load_object
from whetstone.config.sections import LossConfig
from whetstone.errors import UserError


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    logprobs: Tensor  # of the policy now, with gradient
    old_logprobs: Tensor  # of the policy before the first update on this batch
    advantages: Tensor
    ratio: Tensor  # exp(logprobs - old_logprobs), per token or per sequence; with gradient
    sequence_ids: Tensor  # which completion a token belongs to
    num_sequences: int


@dataclass(frozen=True, kw_only=True)
class LossOutputs:
    loss: Tensor  # per token, with gradient
    clipped: Tensor  # true or 1 where clipping removed the gradient or bounded its weight


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    loss: Tensor  # per token, with gradient: the policy loss plus beta x KL
    clipped: Tensor
    kl: Tensor | None


LossFunction = Callable[[LossInputs, LossConfig], LossOutputs]


def policy_loss(
    inputs: LossInputs,
    config: LossConfig,
    *,
    beta: float,
    multiplier: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    full_kl: Tensor | None = None,
) -> PolicyLoss:
    """The loss of `loss_type` plus beta x KL.

    `multiplier`: masks and importance weights of the policy loss. The KL is estimated from
    `reference_logprobs`, or given over the whole vocabulary as `full_kl`.
    """
    function, _ = find_loss(config.loss_type)
    outputs = function(inputs, config)
    if config.loss_type not in LOSSES:
        _check_outputs(outputs, inputs, config.loss_type)
    loss = outputs.loss
    if multiplier is not None:
        loss = loss * multiplier  # before the KL, which covers masked sequences too (as in TRL)
    kl = full_kl
    if reference_logprobs is not None:
        kl = ESTIMATORS[config.kl_estimator](inputs.logprobs, reference_logprobs)
        if config.use_bias_correction_kl:
            kl = kl * inputs.ratio
    if kl is not None:
        loss = loss + beta * kl
    clipped = outputs.clipped.to(inputs.ratio.dtype)
    return PolicyLoss(loss=loss, clipped=clipped, kl=None if kl is None else kl.detach())


def find_loss(loss_type: str) -> tuple[LossFunction, Loss]:
    """The function and the record of a loss."""
    if loss_type in LOSSES:
        return globals()[LOSSES[loss_type].function], LOSSES[loss_type]
    return _load_loss(loss_type)


@functools.cache
def _load_loss(loss_type: str) -> tuple[LossFunction, Loss]:
    """A user's loss. Its attributes `average` (default: token) and `ratio` make its record."""
    function = load_object(loss_type, "loss_type")
    average: Any = getattr(function, "average", "token")
    ratio: Any = getattr(function, "ratio", None)
    for name, value, choices in (("average", average, AVERAGES), ("ratio", ratio, (*RATIO_LEVELS, None))):
        if value not in choices:
            raise UserError(f"loss_type: {loss_type} has {name} = {value!r}: set it to one of {choices}.")
    return function, Loss(function=loss_type, average=average, ratio=ratio)


def _check_outputs(outputs: LossOutputs, inputs: LossInputs, loss_type: str) -> None:
    shape = inputs.logprobs.shape
    if not isinstance(outputs, LossOutputs):
        raise UserError(
            f"loss_type: {loss_type} returned a {type(outputs).__name__}: return LossOutputs(loss=..., "
            "clipped=...) of whetstone.algorithm.losses."
        )
    if outputs.loss.shape != shape or outputs.clipped.shape != shape:
        raise UserError(
            f"loss_type: {loss_type} returned shapes {tuple(outputs.loss.shape)} and "
            f"{tuple(outputs.clipped.shape)}: return one value per token, {tuple(shape)}, without averaging."
        )


def ratio_level(config: LossConfig) -> str:
    """`token` or `sequence`: what the loss requires, else importance_sampling_level."""
    return find_loss(config.loss_type)[1].ratio or config.importance_sampling_level


def importance_ratio(
    logprobs: Tensor, old_logprobs: Tensor, sequence_ids: Tensor, num_sequences: int, level: str
) -> Tensor:
    """New over old probability: of each token, or the geometric mean over its sequence (GSPO)."""
    log_ratio = logprobs - old_logprobs
    if level == "sequence":
        means = sequence_mean(log_ratio, sequence_ids, num_sequences)
        log_ratio = means.index_select(0, sequence_ids)
    return torch.exp(log_ratio)


def clipped_surrogate(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A), with r at most `delta` where that is set (PPO)."""
    low, high = 1 - config.epsilon, 1 + config.upper_epsilon
    ratio, advantages = inputs.ratio, inputs.advantages
    bounded = ratio if config.delta is None else ratio.clamp(max=config.delta)
    loss = -torch.minimum(bounded * advantages, ratio.clamp(low, high) * advantages)
    clipped = ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))
    return LossOutputs(loss=loss, clipped=clipped)


def cispo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """-min(r, epsilon_high) A log p with a detached weight: clipped tokens keep a gradient (MiniMax-M1)."""
    weight = inputs.ratio.detach().clamp(max=config.upper_epsilon)
    clipped = (inputs.ratio > config.upper_epsilon) & (inputs.advantages > 0)
    return LossOutputs(loss=-weight * inputs.advantages * inputs.logprobs, clipped=clipped)


def sapo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """-(4 / t) sigmoid(t (r - 1)) A: a soft gate, with another temperature t for negative advantages."""
    ratio = inputs.ratio
    good, bad = ratio.new_tensor(config.sapo_temperature_pos), ratio.new_tensor(config.sapo_temperature_neg)
    temperature = torch.where(inputs.advantages > 0, good, bad)
    gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
    return LossOutputs(loss=-gate * inputs.advantages, clipped=torch.zeros_like(ratio))


def reinforce(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """-A log p: no ratio, no clipping; for batches that are used once."""
    return LossOutputs(loss=-inputs.advantages * inputs.logprobs, clipped=torch.zeros_like(inputs.ratio))


def negative_log_likelihood(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """-log p: supervised fine-tuning on solutions."""
    return LossOutputs(loss=-inputs.logprobs, clipped=torch.zeros_like(inputs.ratio))


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    difference = reference - logprobs
    return torch.exp(difference) - difference - 1


# Estimators of the KL divergence from a reference. With d = log p - log q (policy, reference) and tokens
# sampled from the policy, all three have the KL divergence near their mean: k1 = d exactly, but noisy and of
# either sign; k2 = d^2 / 2 nearly, never negative; k3 = exp(-d) + d - 1 exactly, never negative. As part of a
# loss only the gradient matters. Times the ratio (use_bias_correction_kl) that of k1 and k3 is the KL's, and
# that of k2 nearly; without it that of k2 is the KL's, that of k1 is 0 on average.
ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": lambda logprobs, reference: logprobs - reference,
    "k2": lambda logprobs, reference: (logprobs - reference).square() / 2,
    "k3": k3,
}
