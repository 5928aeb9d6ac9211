"""One AdamW step on flat weights, in plain torch; `kernels.py` has the same as one GPU kernel.

A bf16 weight plus its low 16 bits is a float32 weight: `merge_halves` and `split_halves`. The model computes
with the bf16 weight alone, the float32 one rounded to the nearest or stochastically. Pretrained weights lie
on bf16's grid, and a step of RL moves them by a hundredth of its width: rounded to the nearest, few change in
the first dozens of steps. The random bits are a function of the position alone: a weight changes once on its
way to the next number, and the rest has no more than 16 bits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from whetstone.optimizer.quantization import FIRST_MOMENT, SECOND_MOMENT, dequantize, noise, quantize
from whetstone.parallel.fsdp import local

HALF = 0x8000
NAN = 0x7FC00000


@dataclass(frozen=True, kw_only=True)
class AdamWStep:
    """Settings of one step of one parameter."""

    rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    clip: float  # gradients are multiplied by it
    step: int = 0  # of this parameter, 1 for the first
    seed: int = 0  # of the rounding of 8-bit states; below 2^31

    def for_parameter(self, parameter: Tensor, step: int) -> "AdamWStep":
        """For one parameter. Norms and biases have no weight decay, as in transformers and TRL."""
        return replace(self, step=step, weight_decay=self.weight_decay if parameter.dim() > 1 else 0.0)

    @property
    def size(self) -> float:
        """What mean / root is multiplied by."""
        return self.rate / (1 - self.beta1**self.step)

    @property
    def root(self) -> float:
        """What the root of the squared gradient is divided by."""
        return math.sqrt(1 - self.beta2**self.step)

    @property
    def decay(self) -> float:
        return self.rate * self.weight_decay


@dataclass(frozen=True, kw_only=True)
class State:
    """The optimizer's memory of a flat piece of n weights. Views: changing them changes the state."""

    low_bits: Tensor | None  # int16 [n]: the lower halves of bf16 weights; None: weights are float32
    mean: Tensor  # [n] of the gradient: float32, or int8 codes
    square: Tensor  # [n] of its square: float32, or uint8 codes
    mean_scale: Tensor | None  # float32, one per block of codes
    square_scale: Tensor | None
    is_stochastic: bool = False  # the rounding of the weights

    def rounding(self, weight: Tensor, first: int) -> Tensor | int:
        """What is added to a float32 weight before its upper 16 bits are taken: half a step of bf16, or 16
        random bits for each weight, always the same. `first`: the number of the first one in its parameter.
        """
        if not self.is_stochastic:
            return HALF
        return (noise(first, len(weight), 0, weight) & 0xFFFF).int()

    def moments(self, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Mean and square in float32; `part` begins at a block's beginning."""
        if self.mean_scale is None or self.square_scale is None:
            return self.mean[part], self.square[part]
        blocks = FIRST_MOMENT.blocks(part)
        return (
            dequantize(FIRST_MOMENT, self.mean[part], self.mean_scale[blocks]),
            dequantize(SECOND_MOMENT, self.square[part], self.square_scale[blocks]),
        )

    def store(
        self, mean: Tensor, square: Tensor, part: slice = slice(None), chance: Tensor | None = None
    ) -> None:
        """`moments` undone; with `chance` codes are rounded at random, else to the nearest."""
        if self.mean_scale is None or self.square_scale is None:
            self.mean[part].copy_(mean)
            self.square[part].copy_(square)
            return
        blocks = FIRST_MOMENT.blocks(part)
        high, low = (None, None) if chance is None else (chance >> 16, chance & 0xFFFF)
        for kind, values, codes, scales, bits in (
            (FIRST_MOMENT, mean, self.mean, self.mean_scale, low),
            (SECOND_MOMENT, square, self.square, self.square_scale, high),
        ):
            new_codes, new_scales = quantize(kind, values, bits)
            codes[part].copy_(new_codes)
            scales[blocks].copy_(new_scales)


class Job(NamedTuple):
    """One step of a flat weight, which begins at value `first` of its parameter."""

    weight: Tensor
    gradient: Tensor
    state: State
    settings: AdamWStep
    first: int


def merge_halves(weight: Tensor, low: Tensor | None, rounding: Tensor | int = HALF) -> Tensor:
    """The float32 weights of which `weight` is the upper half; themselves, where there is no lower one.

    `rounding`: as in `split_halves`, `State.rounding`.
    """
    if low is None:
        return weight
    rest = ((low.int() + rounding) & 0xFFFF) - rounding
    return ((weight.view(torch.int16).int() << 16) + rest).view(torch.float32)


def split_halves(whole: Tensor, weight: Tensor, low: Tensor | None, rounding: Tensor | int = HALF) -> None:
    """Write float32 weights into bf16 ones and the rest into `low`."""
    if low is None:
        weight.copy_(whole)
        return
    # NaN: the largest patterns would run over into a number. The rest is between -rounding and 65535 -
    # rounding, so its last 16 bits tell what it is.
    bits = torch.where(whole.isnan(), NAN, whole.contiguous().view(torch.int32))
    high = (bits + rounding) >> 16
    weight.copy_(high.to(torch.int16).view(torch.bfloat16))
    low.copy_((bits - (high << 16)).to(torch.int16))


def adamw_steps(jobs: Sequence[Job]) -> None:
    for job in jobs:
        adamw_step(*job)


@torch.no_grad()
def adamw_step(weight: Tensor, gradient: Tensor, state: State, settings: AdamWStep, first: int = 0) -> None:
    """One step of the flat `weight`, which begins at value `first` of its parameter."""
    gradient = gradient.float() * settings.clip
    mean, square = state.moments()
    mean = mean.lerp(gradient, 1 - settings.beta1)
    square = (square * settings.beta2).addcmul_(gradient, gradient, value=1 - settings.beta2)
    root = (square.sqrt() / settings.root).add_(settings.epsilon)
    rounding = state.rounding(weight, first)
    whole = merge_halves(weight, state.low_bits, rounding)
    whole = whole - (whole * settings.decay + mean / root * settings.size)
    split_halves(whole, weight, state.low_bits, rounding)
    is_coded = state.mean_scale is not None
    state.store(mean, square, chance=noise(first, len(weight), settings.seed, weight) if is_coded else None)


class TorchAdamW:
    """float32 weights on a CPU: torch's fused AdamW, on this rank's shards."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        # A whole parameter itself, for its memory may be exchanged; of a sharded one the part that is here.
        self._weights = [p if local(p) is p else local(p.detach()) for p in parameters]
        groups = [[w for w in self._weights if (w.dim() > 1) is decays] for decays in (True, False)]
        self._adam = torch.optim.AdamW([{"params": group} for group in groups], fused=True)
        for weight in self._weights:  # at once, so that a checkpoint can be read into them
            zeros = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
            self._adam.state[weight] = {"step": torch.zeros(()), **zeros}

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None], settings: AdamWStep) -> None:
        for group, decay in zip(self._adam.param_groups, (settings.weight_decay, 0.0), strict=True):
            group |= {"lr": settings.rate, "betas": (settings.beta1, settings.beta2)}
            group |= {"eps": settings.epsilon, "weight_decay": decay}
        for weight, gradient in zip(self._weights, gradients, strict=True):
            if gradient is not None and settings.clip != 1:
                gradient.mul_(settings.clip)
            weight.grad = gradient
        self._adam.step()

    def zero_grad(self) -> None:
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
