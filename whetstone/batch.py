"""Scored groups and their advantages -> packed micro-batches.

Sequences (prompt + completion) are laid end to end without padding; only completion tokens carry targets. One
optimiser step is a list of `Batch`es whose token weights are counted over the whole step. Does not run the
model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whetstone.config import Config
from whetstone.types import Finish, Group, Rollout


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Several sequences end to end. T: all tokens; N: completion tokens, each predicted from row `rows[n]`;
    S: sequences.
    """

    token_ids: Tensor  # [T]
    position_ids: Tensor  # [T], from 0 in every sequence
    lengths: list[int]  # [S] tokens of each sequence, prompt included
    rows: Tensor  # [N] the position in T whose hidden state predicts the token
    targets: Tensor  # [N] the token
    sequence: Tensor  # [N] which of the S sequences it belongs to
    sampler_logprobs: Tensor  # [N]
    advantages: Tensor  # [N]
    keep: Tensor  # [S] 1, or 0 for a sequence that takes no part in the loss

    def to(self, device: torch.device) -> "Batch":
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return Batch(lengths=self.lengths, **moved)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A rollout and its advantage: the unit of packing."""

    rollout: Rollout
    advantage: float
    keep: bool

    @property
    def num_tokens(self) -> int:
        return len(self.rollout.prompt_ids) + len(self.rollout.completion.token_ids)


def make_samples(groups: Sequence[Group], advantages_PG: Tensor, config: Config) -> list[Sample]:
    """One sample per rollout, in order; truncated ones are left out of the loss where the configuration says
    so.
    """
    return [
        Sample(
            rollout=rollout,
            advantage=advantage,
            keep=not (config.loss.mask_truncated_completions and rollout.completion.finish is Finish.LENGTH),
        )
        for group, row in zip(groups, advantages_PG.tolist(), strict=True)
        for rollout, advantage in zip(group.rollouts, row, strict=True)
    ]


def split(samples: list[Sample], parts: int, seed: int) -> list[list[Sample]]:
    """Shuffle and cut into equal parts, one optimiser step each. A single part keeps its order."""
    if parts == 1:
        return [samples]
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed)).tolist()
    size = len(samples) // parts
    return [[samples[i] for i in order[part * size : (part + 1) * size]] for part in range(parts)]


def pack(samples: list[Sample], max_tokens: int) -> list[Batch]:
    """Micro-batches of at most `max_tokens` tokens (a longer sequence gets one of its own), of like lengths
    and like sizes.
    """
    ordered = sorted(samples, key=lambda sample: -sample.num_tokens)
    total = sum(sample.num_tokens for sample in ordered)
    # Even shares instead of full bins and a nearly empty last one.
    share = total / max(1, -(-total // max_tokens))
    bins: list[list[Sample]] = [[]]
    filled = 0
    for sample in ordered:
        if bins[-1] and (filled + sample.num_tokens > max_tokens or filled >= share):
            bins.append([])
            filled = 0
        bins[-1].append(sample)
        filled += sample.num_tokens
    return [_lay_end_to_end(entries) for entries in bins if entries]


def _lay_end_to_end(samples: list[Sample]) -> Batch:
    token_ids: list[int] = []
    position_ids: list[int] = []
    rows: list[int] = []
    targets: list[int] = []
    sequence: list[int] = []
    sampler_logprobs: list[float] = []
    advantages: list[float] = []
    for number, sample in enumerate(samples):
        prompt, completion = sample.rollout.prompt_ids, sample.rollout.completion
        first = len(token_ids) + len(prompt) - 1  # the last prompt token predicts the first completion token
        rows.extend(range(first, first + len(completion.token_ids)))
        token_ids.extend((*prompt, *completion.token_ids))
        position_ids.extend(range(sample.num_tokens))
        targets.extend(completion.token_ids)
        sequence.extend([number] * len(completion.token_ids))
        sampler_logprobs.extend(completion.logprobs)
        advantages.extend([sample.advantage] * len(completion.token_ids))
    return Batch(
        token_ids=torch.tensor(token_ids),
        position_ids=torch.tensor(position_ids),
        lengths=[sample.num_tokens for sample in samples],
        rows=torch.tensor(rows),
        targets=torch.tensor(targets),
        sequence=torch.tensor(sequence),
        sampler_logprobs=torch.tensor(sampler_logprobs, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        keep=torch.tensor([float(sample.keep) for sample in samples]),
    )
