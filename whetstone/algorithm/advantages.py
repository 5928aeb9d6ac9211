"""Rewards -> advantages. Pure functions of tensors; shapes: _PG problems x group."""

import torch
from torch import Tensor

EPSILON = 1e-4  # beside the standard deviation, as in TRL


def group_advantages(rewards_PG: Tensor, scale: str) -> Tensor:
    """How much better each completion did than the mean of its group, in units of `scale` (group, batch,
    none).
    """
    advantages_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    if scale == "none":
        return advantages_PG
    # A single reward has no spread: its deviation counts as 0, not as NaN.
    if scale == "group":
        deviation = (
            rewards_PG.std(dim=1, keepdim=True) if rewards_PG.shape[1] > 1 else torch.zeros_like(rewards_PG)
        )
    else:
        deviation = rewards_PG.std() if rewards_PG.numel() > 1 else torch.zeros(())
    return advantages_PG / (deviation + EPSILON)
