"""Rewards -> advantages. Pure functions of tensors; shapes: _PG problems x group.

Two choices: the baseline (`advantage`: the mean of the group, the mean of the others, the mean of the batch)
and the scale (`scale_rewards`: the spread of the group, of the batch, or none).
"""

import torch
from torch import Tensor

EPSILON = 1e-4  # beside the standard deviation, as in TRL


def estimate(rewards_PG: Tensor, *, baseline: str, scale: str) -> Tensor:
    """How much better each completion did than its baseline, in units of `scale`.

    group: the mean of its group (GRPO). rloo: the mean of the others in its group. reinforce_pp: the mean of
    the whole batch, always in units of the batch's spread (REINFORCE++).
    """
    if baseline == "reinforce_pp":
        return (rewards_PG - rewards_PG.mean()) / (_spread(rewards_PG, "batch") + EPSILON)
    advantages_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    if baseline == "rloo":
        size = rewards_PG.shape[1]
        assert size > 1, "there are no others in a group of one"
        advantages_PG = advantages_PG * size / (size - 1)  # r - mean of the others
    return advantages_PG if scale == "none" else advantages_PG / (_spread(rewards_PG, scale) + EPSILON)


def _spread(rewards_PG: Tensor, scale: str) -> Tensor:
    """Standard deviations; a single reward has no spread: 0, not NaN."""
    if scale != "group":
        return rewards_PG.std() if rewards_PG.numel() > 1 else torch.zeros(())
    return rewards_PG.std(dim=1, keepdim=True) if rewards_PG.shape[1] > 1 else torch.zeros_like(rewards_PG)
