"""Loss normalizers and metrics of an optimizer step: over all its micro-batches, on all ranks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from whetstone.parallel.collectives import all_reduce_data
from whetstone.parallel.mesh import Ranks


@dataclass(frozen=True, kw_only=True)
class LossNormalizers:
    """Counts over a whole optimizer step, fixed before its first backward pass."""

    token_weights: list[Tensor]  # per micro-batch, [S]: the weight of a token of each completion
    num_tokens: float  # in the loss
    num_entropy_tokens: float  # that the entropy bonus is averaged over
    entropy_threshold: Tensor | None  # None: tokens of any entropy are in the loss


class TokenMeans:
    """Means over the tokens of an optimizer step on all ranks. Sums stay on the device until `means`."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.sums: dict[str, tuple[Tensor, int]] = {}

    def add(self, num_tokens: int, **values: Tensor | None) -> None:
        for name, value in values.items():
            if value is not None:
                total, count = self.sums.get(name, (torch.zeros((), device=value.device), 0))
                self.sums[name] = (total + value.sum(), count + num_tokens)

    def means(self) -> dict[str, float]:
        table = torch.tensor([(total.item(), count) for total, count in self.sums.values()])
        table = all_reduce_data(self.ranks, table.double()).tolist()
        return {name: total / max(1, count) for name, (total, count) in zip(self.sums, table, strict=True)}


class StepMetrics:
    """The metrics of several optimizer steps, and their mean."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def add(self, metrics: dict[str, float]) -> None:
        self.steps.append(metrics)

    def means(self) -> dict[str, float]:
        return {name: sum(step[name] for step in self.steps) / len(self.steps) for name in self.steps[0]}
