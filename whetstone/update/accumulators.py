"""What is counted around an optimiser step: weights of tokens before it, sums and means after it.

Counts and means are over all ranks and all micro-batches of a step, so that neither changes a gradient or a
metric. Knows no model and no loss.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from whetstone.parallel.collectives import sum_of_data
from whetstone.parallel.mesh import Ranks


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What a whole optimiser step adds up to, so that its gradient does not depend on micro-batches."""

    weights: list[Tensor]  # for each micro-batch, [S]: what a token of each completion weighs
    tokens: float  # that take part
    entropy_tokens: float  # that the entropy bonus is averaged over
    entropy_threshold: Tensor | None  # None: tokens of any entropy are learnt from


class Sums:
    """Sums over the tokens of an optimiser step, kept on the device until the end; means over those of all
    ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.values: dict[str, tuple[Tensor, int]] = {}

    def add(self, count: int, **values: Tensor | None) -> None:
        for name, value in values.items():
            if value is not None:
                total, tokens = self.values.get(name, (torch.zeros((), device=value.device), 0))
                self.values[name] = (total + value.sum(), tokens + count)

    def means(self) -> dict[str, float]:
        table = torch.tensor([(total.item(), tokens) for total, tokens in self.values.values()])
        table = sum_of_data(self.ranks, table.double()).tolist()
        return {
            name: total / max(1, tokens) for name, (total, tokens) in zip(self.values, table, strict=True)
        }


class Totals:
    """The rows of several optimiser steps, and their mean."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.skipped = 0
        self.splits = 0  # times that memory ran out

    def add(self, means: dict[str, float], **values: float) -> None:
        self.steps.append({**means, **values})

    def means(self) -> dict[str, float]:
        row = {name: sum(step[name] for step in self.steps) / len(self.steps) for name in self.steps[0]}
        return {**row, "skipped_steps": float(self.skipped), "oom_splits": float(self.splits)}
