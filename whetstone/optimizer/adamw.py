"""AdamW on flat pieces of weights: the arithmetic in plain torch, and what a step needs to know.

The same arithmetic as torch.optim.AdamW with float32 weights; `kernels.py` does it again in one pass on a
GPU. A bf16 weight and 16 bits beside it are a float32 weight: `join` and `split`. Stores nothing.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from whetstone.optimizer.quantization import FIRST, SECOND, dequantise, noise, quantise

HALF = 0x8000
NAN = 0x7FC00000


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """One step of one parameter."""

    rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    clip: float  # gradients are multiplied by it
    step: int = 0  # of this parameter, 1 for the first
    seed: int = 0  # of the rounding of 8-bit states; below 2^31

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
    """The optimiser's memory of a flat piece of n weights. Views: changing them changes the state."""

    low: Tensor | None  # int16 [n]: the lower halves of bf16 weights; None: weights are float32
    mean: Tensor  # [n] of the gradient: float32, or int8 codes
    square: Tensor  # [n] of its square: float32, or uint8 codes
    mean_scale: Tensor | None  # float32, one per block of codes
    square_scale: Tensor | None

    def moments(self, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Mean and square in float32; `part` begins at a block's beginning."""
        if self.mean_scale is None or self.square_scale is None:
            return self.mean[part], self.square[part]
        blocks = FIRST.blocks(part)
        return (
            dequantise(FIRST, self.mean[part], self.mean_scale[blocks]),
            dequantise(SECOND, self.square[part], self.square_scale[blocks]),
        )

    def keep(
        self, mean: Tensor, square: Tensor, part: slice = slice(None), chance: Tensor | None = None
    ) -> None:
        """`moments` undone; with `chance` codes are rounded at random, else to the nearest."""
        if self.mean_scale is None or self.square_scale is None:
            self.mean[part].copy_(mean)
            self.square[part].copy_(square)
            return
        blocks = FIRST.blocks(part)
        high, low = (None, None) if chance is None else (chance >> 16, chance & 0xFFFF)
        for kind, values, codes, scales, bits in (
            (FIRST, mean, self.mean, self.mean_scale, low),
            (SECOND, square, self.square, self.square_scale, high),
        ):
            new_codes, new_scales = quantise(kind, values, bits)
            codes[part].copy_(new_codes)
            scales[blocks].copy_(new_scales)


def join(weight: Tensor, low: Tensor | None) -> Tensor:
    """The float32 weights of which `weight` is the upper half; themselves, where there is no lower one."""
    if low is None:
        return weight
    bits = (weight.view(torch.int16).int() << 16) + low.int()
    return bits.view(torch.float32)


def split(whole: Tensor, weight: Tensor, low: Tensor | None) -> None:
    """Write float32 weights into bf16 ones, rounded to the nearest, and the rest into `low`."""
    if low is None:
        weight.copy_(whole)
        return
    # Halves away from zero, since the rest of an even half would not fit 16 bits. NaN: the largest patterns
    # would run over into a number.
    bits = torch.where(whole.isnan(), NAN, whole.contiguous().view(torch.int32))
    high = (bits + HALF) >> 16
    weight.copy_(high.to(torch.int16).view(torch.bfloat16))
    low.copy_((bits - (high << 16)).to(torch.int16))


@torch.no_grad()
def move(weight: Tensor, gradient: Tensor, state: State, numbers: Numbers, first: int = 0) -> None:
    """One step of the flat `weight`, which begins at value `first` of its parameter."""
    gradient = gradient.float() * numbers.clip
    mean, square = state.moments()
    mean = mean.lerp(gradient, 1 - numbers.beta1)
    square = (square * numbers.beta2).addcmul_(gradient, gradient, value=1 - numbers.beta2)
    root = (square.sqrt() / numbers.root).add_(numbers.epsilon)
    whole = join(weight, state.low)
    split(whole - (whole * numbers.decay + mean / root * numbers.size), weight, state.low)
    is_coded = state.mean_scale is not None
    state.keep(mean, square, chance=noise(first, len(weight), numbers.seed, weight) if is_coded else None)
