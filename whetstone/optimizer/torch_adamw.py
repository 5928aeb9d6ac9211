"""float32 weights on a CPU: torch's fused AdamW, on this rank's shards."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from whetstone.optimizer.adamw import AdamWStep
from whetstone.parallel.fsdp import local


class TorchAdamW:
    def __init__(self, parameters: Sequence[nn.Parameter]):
        # A whole parameter itself, for its memory may be exchanged; of a sharded one the part that is here.
        self._weights = [p if local(p) is p else local(p.detach()) for p in parameters]
        self._adam = torch.optim.AdamW(self._weights, fused=True)
        for weight in self._weights:  # at once, so that a checkpoint can be read into them
            zeros = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
            self._adam.state[weight] = {"step": torch.zeros(()), **zeros}

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None], settings: AdamWStep) -> None:
        (group,) = self._adam.param_groups
        group |= {"lr": settings.rate, "betas": (settings.beta1, settings.beta2), "eps": settings.epsilon}
        group["weight_decay"] = settings.weight_decay
        for weight, gradient in zip(self._weights, gradients, strict=True):
            if gradient is not None and settings.clip != 1:
                gradient.mul_(settings.clip)
            weight.grad = gradient
        self._adam.step()

    def zero_grad(self) -> None:
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
