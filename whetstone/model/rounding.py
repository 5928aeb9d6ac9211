"""Stochastic rounding to half precision.

The weights of a model in bf16 lie on bf16's grid. A change by less than half a step, such as that of a LoRA
adapter after some updates, is lost where the sum is rounded to the nearest: all weights stay as they were.
Rounded up or down at random, with a chance in proportion, the sum is right on average over many weights.
"""

import math

import torch
from torch import Tensor


def stochastic_round(values: Tensor, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """`values` in `dtype`. Those that it can represent do not change; the random bits are always the same for
    a shape and a seed.
    """
    if dtype not in (torch.bfloat16, torch.float16) or values.dtype == dtype:
        return values.to(dtype)
    values = values.float().contiguous()
    dropped = 23 + round(math.log2(torch.finfo(dtype).eps))  # of float32's 23 bits
    generator = torch.Generator(values.device).manual_seed(seed)
    bits = torch.randint(
        0, 1 << dropped, values.shape, dtype=torch.int32, device=values.device, generator=generator
    )
    bits.add_(values.view(torch.int32)).bitwise_and_(-(1 << dropped))
    rounded = bits.view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(dtype)
