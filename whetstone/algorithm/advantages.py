"""Rewards -> advantages. Pure; _PGT problems x group x turns, _S sequences, _N completion tokens."""

import torch
from torch import Tensor

EPSILON = 1e-4  # beside the standard deviation, as in TRL


def discounted(rewards_PGT: Tensor, discount: float) -> Tensor:
    """The rewards from each turn on: R_t = r_t + discount R_{t+1}."""
    returns, following = torch.zeros_like(rewards_PGT), torch.zeros_like(rewards_PGT[..., 0])
    for turn in reversed(range(rewards_PGT.shape[-1])):
        following = rewards_PGT[..., turn] + discount * following
        returns[..., turn] = following
    return returns


def estimate(rewards_PGT: Tensor, exists_PGT: Tensor, *, baseline: str, scale: str) -> Tensor:
    """How much better each turn of each completion did than its baseline, in units of `scale`; 0 for turns
    that do not exist, and in a group of one. A turn is compared with those of the same number.

    group: the mean of its group (GRPO). rloo: the mean of the others in its group. reinforce_pp: the mean of
    the whole batch, always in units of the batch's spread (REINFORCE++).
    """
    batch, group = (0, 1, 2), (1,)
    if baseline == "reinforce_pp":
        advantages = _centered(rewards_PGT, exists_PGT, batch)
        return advantages / (_spread(rewards_PGT, exists_PGT, batch) + EPSILON)
    advantages = _centered(rewards_PGT, exists_PGT, group)
    if baseline == "rloo":
        size = exists_PGT.sum(1, keepdim=True)
        advantages = advantages * size / (size - 1).clamp(min=1)  # r - mean of the others
    if scale == "none":
        return advantages
    return advantages / (_spread(rewards_PGT, exists_PGT, group if scale == "group" else batch) + EPSILON)


def _centered(rewards: Tensor, exists: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Rewards minus their mean: exactly 0 where all are equal, which the rounded mean of three 1.2 is not."""
    mean = (rewards * exists).sum(dims, keepdim=True) / exists.sum(dims, keepdim=True).clamp(min=1)
    absent = exists == 0
    high = rewards.masked_fill(absent, -torch.inf).amax(dims, keepdim=True)
    low = rewards.masked_fill(absent, torch.inf).amin(dims, keepdim=True)
    return torch.where(absent | (low == high), 0.0, rewards - mean)


def _spread(rewards: Tensor, exists: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Standard deviations; a single reward has no spread: 0, not NaN."""
    squares = _centered(rewards, exists, dims).square().sum(dims, keepdim=True)
    return (squares / (exists.sum(dims, keepdim=True) - 1).clamp(min=1)).sqrt()


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
