"""float32 weights on a CPU: torch's own fused AdamW, which is fast there and holds its own moments.

Sharded parameters are moved in this rank's part. Knows no schedule and no ranks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from whetstone.optimizer.adamw import Numbers
from whetstone.parallel.fsdp import local


class PlainAdam:
    def __init__(self, parameters: Sequence[nn.Parameter]):
        # A whole parameter itself, for its memory may be exchanged; of a sharded one the part that is here.
        self._weights = [p if local(p) is p else local(p.detach()) for p in parameters]
        self._adam = torch.optim.AdamW(self._weights, fused=True)
        for weight in self._weights:  # at once, so that a checkpoint can be read into them
            zeros = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
            self._adam.state[weight] = {"step": torch.zeros(()), **zeros}

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None], numbers: Numbers) -> None:
        (group,) = self._adam.param_groups
        group |= {"lr": numbers.rate, "betas": (numbers.beta1, numbers.beta2), "eps": numbers.epsilon}
        group["weight_decay"] = numbers.weight_decay
        for weight, gradient in zip(self._weights, gradients, strict=True):
            if gradient is not None and numbers.clip != 1:
                gradient.mul_(numbers.clip)
            weight.grad = gradient
        self._adam.step()

    def forget(self) -> None:
        """Let go of the gradients."""
        for weight in self._weights:
            weight.grad = None

    def export(self, index: int) -> dict[str, Tensor]:
        """Step, moments and weight of one parameter: the very memory."""
        weight = self._weights[index]
        return {**self._adam.state[weight], "master": weight.detach()}

    @torch.no_grad()
    def load(self, index: int, state: dict[str, Tensor]) -> None:
        for name, value in self.export(index).items():
            value.copy_(state[name])
