"""Rewards -> advantages. Pure; _PG problems x group, _S sequences, _N completion tokens."""

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


def gae(
    rewards_N: Tensor, values_N: Tensor, sequence_ids_N: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation: (advantages [N], returns [N]); a sequence's tokens stand in order.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lambda A_{t+1}, return_t = A_t + V_t; after its
    last token a completion is worth nothing more.
    """
    if not len(sequence_ids_N):  # a rank without work
        return rewards_N, values_N
    lengths_S = torch.bincount(sequence_ids_N)
    column = torch.cat([torch.arange(int(length)) for length in lengths_S]).to(sequence_ids_N.device)
    shape = (len(lengths_S), int(lengths_S.max()))
    rewards = rewards_N.new_zeros(shape)
    values = values_N.new_zeros(shape)  # 0 beyond the end: nothing more to earn
    rewards[sequence_ids_N, column], values[sequence_ids_N, column] = rewards_N, values_N
    advantages = torch.zeros_like(rewards)
    running = rewards.new_zeros(shape[0])
    for t in reversed(range(shape[1])):
        following = values[:, t + 1] if t + 1 < shape[1] else torch.zeros_like(running)
        running = rewards[:, t] + gamma * following - values[:, t] + gamma * gae_lambda * running
        advantages[:, t] = running
    advantages_N = advantages[sequence_ids_N, column]
    return advantages_N, advantages_N + values_N


def whiten(advantages_N: Tensor) -> Tensor:
    """Mean 0 and spread 1 over all tokens."""
    spread = advantages_N.std() if len(advantages_N) > 1 else torch.zeros((), device=advantages_N.device)
    return (advantages_N - advantages_N.mean()) / (spread + EPSILON)


def explained_variance(values_N: Tensor, returns_N: Tensor) -> float:
    """Share of the returns' variance that the values predict; 0 where there is no variance."""
    total = returns_N.var(correction=0).item()
    return 1 - (returns_N - values_N).var(correction=0).item() / total if total > 0 else 0.0


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Half the squared error; with `clip`, or that of the value held near the old one if larger (PPO)."""
    loss = (values - returns).square() / 2
    if clip is None:
        return loss
    held = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum(loss, (held - returns).square() / 2)
