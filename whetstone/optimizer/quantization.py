"""8-bit Adam moments: blocks of 256 values with a float32 scale and logarithmic codes.

Logarithmic, since the relative error of each value counts. A second moment that is not 0 never becomes 0.
Stochastic rounding: the second moment changes by about 0.1 % per step, far below the 9 % code spacing, so
round-to-nearest would freeze it. The random bits are a function of (step, parameter, position). Dequantized
values quantize to the same codes.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # values that share a scale


@dataclass(frozen=True)
class Codebook:
    levels: int  # beside 0; code `levels` is the largest value of the block
    decades: float  # from the first level to the last
    floor: float  # scales are not below it: the first level stays a normal number
    is_signed: bool

    @property
    def slope(self) -> float:
        """Levels per doubling."""
        return (self.levels - 1) / (self.decades * math.log2(10))

    @staticmethod
    def blocks(part: slice) -> slice:
        """The blocks of some values."""
        assert (part.start or 0) % BLOCK == 0
        return slice((part.start or 0) // BLOCK, None if part.stop is None else -(-part.stop // BLOCK))


FIRST_MOMENT = Codebook(levels=127, decades=4.0, floor=1e-30, is_signed=True)
SECOND_MOMENT = Codebook(levels=255, decades=10.0, floor=1e-25, is_signed=False)


@functools.cache
def table(codebook: Codebook, device: torch.device) -> Tensor:
    """Code -> value in units of the scale; float32 [levels + 1]."""
    below = torch.arange(codebook.levels - 1, -1, -1, dtype=torch.float64) / (codebook.levels - 1)
    values = torch.cat([torch.zeros(1, dtype=torch.float64), 10 ** (-codebook.decades * below)])
    return values.float().to(device)


def quantize(codebook: Codebook, values: Tensor, chance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Flat values -> codes and scales. `chance`: 16 random bits each; without it, the nearest level."""
    blocks = F.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1).clamp(min=codebook.floor)
    ratio = (blocks.abs() / scales[:, None]).view(-1)[: len(values)]
    levels = table(codebook, values.device)
    lowest = 0 if codebook.is_signed else 1
    position = torch.log2(ratio.clamp(min=1e-20)) * codebook.slope + codebook.levels
    lower = position.floor().clamp(lowest, codebook.levels - 1).int()
    below, above = levels[lower], levels[lower + 1]
    threshold = 0.5 if chance is None else (chance.float() + 0.5) / 65536
    codes = lower + ((ratio - below) / (above - below) > threshold)
    if codebook.is_signed:
        return (codes * values.sign()).to(torch.int8), scales
    return torch.where(values > 0, codes, 0).to(torch.uint8), scales


def dequantize(codebook: Codebook, codes: Tensor, scales: Tensor) -> Tensor:
    values = table(codebook, codes.device)[codes.int().abs()] * scales.repeat_interleave(BLOCK)[: len(codes)]
    return values * codes.sign() if codebook.is_signed else values


def noise(first: int, length: int, seed: int, like: Tensor) -> Tensor:
    """32 random bits for each of the values from `first` on: a hash of position and seed, in int64."""
    return _hash((torch.arange(first, first + length, device=like.device) ^ seed) & 0xFFFFFFFF)


def seed_of(step: int, parameter: int) -> int:
    """31 bits."""
    return _hash((step * 0x9E3779B1 + parameter * 0x85EBCA6B) & 0xFFFFFFFF) & 0x7FFFFFFF


def _hash(bits: Any) -> Any:
    """32 bits to 32 bits: a number, or a tensor of int64."""
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return bits ^ (bits >> 16)
