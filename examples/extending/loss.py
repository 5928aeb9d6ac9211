"""REINFORCE with a truncated importance weight: no gradient is clipped away, no weight exceeds 2."""

from whetstone.algorithm.losses import LossInputs, LossOutputs
from whetstone.config.sections import LossConfig


def reinforce(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    weight = inputs.ratio.detach().clamp(max=2.0)
    return LossOutputs(loss=-weight * inputs.advantages * inputs.logprobs, clipped=inputs.ratio > 2.0)


reinforce.average = "token"  # how tokens are averaged: token (as dapo), sequence (as grpo) or constant
