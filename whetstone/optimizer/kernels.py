"""`adamw.adamw_step` of flat weights as one Triton kernel: everything is read and written once.

Small parameters, such as those of LoRA, have one launch together: hundreds of launches one after the other
take the host longer than their work takes the GPU.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from whetstone.optimizer.adamw import AdamWStep, Job, State
from whetstone.optimizer.quantization import BLOCK, FIRST_MOMENT, SECOND_MOMENT, table

ROWS = 4  # blocks of codes that a program does
SMALL = 2**20  # parameters with fewer values have one launch together
SMALL_BLOCK = 1024  # of their values, for one program


@triton.jit
def _noise(index, seed):
    bits = index.to(tl.uint32) ^ seed.to(tl.uint32)
    bits = bits ^ (bits >> 16)
    bits = bits * 0x7FEB352D
    bits = bits ^ (bits >> 15)
    bits = bits * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _code(
    size, scale, chance, table_ptr,
    LEVELS: tl.constexpr, LOWEST: tl.constexpr, SLOPE: tl.constexpr,
):  # fmt: skip
    """The level of a size between 0 and `scale`, rounded up or down by 16 bits of chance."""
    ratio = tl.div_rn(size, scale)
    index = tl.log2(tl.maximum(ratio, 1e-20)) * SLOPE + LEVELS
    lower = tl.minimum(tl.maximum(tl.floor(index), LOWEST), LEVELS - 1).to(tl.int32)
    below = tl.load(table_ptr + lower)
    above = tl.load(table_ptr + lower + 1)
    threshold = (chance.to(tl.float32) + 0.5) / 65536
    return lower + (tl.div_rn(ratio - below, above - below) > threshold).to(tl.int32)


@triton.jit
def _moments(gradient, mean, square, fresh1, beta2, fresh2):
    return mean + fresh1 * (gradient - mean), square * beta2 + fresh2 * gradient * gradient


@triton.jit
def _move_weight(
    weight_ptr, low_ptr, index, first, inside, mean, square, epsilon, size, root, decay,
    SPLIT: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    change = tl.div_rn(mean, tl.div_rn(tl.sqrt_rn(square), root) + epsilon) * size
    if SPLIT:
        if STOCHASTIC:
            rounding = (_noise(index + first, tl.full((), 0, tl.uint32)) & 0xFFFF).to(tl.int32)
        else:
            rounding = 0x8000
        high = tl.load(weight_ptr + index, mask=inside, other=0).to(tl.int32)
        low = tl.load(low_ptr + index, mask=inside, other=0).to(tl.int32)
        bits = (high << 16) + ((low + rounding) & 0xFFFF) - rounding
        weight = bits.to(tl.float32, bitcast=True)
    else:
        weight = tl.load(weight_ptr + index, mask=inside, other=0.0)
    weight = weight - (weight * decay + change)
    if SPLIT:
        bits = tl.where(weight != weight, 0x7FC00000, weight.to(tl.int32, bitcast=True))
        high = (bits + rounding) >> 16
        tl.store(weight_ptr + index, high.to(tl.int16), mask=inside)
        tl.store(low_ptr + index, (bits - (high << 16)).to(tl.int16), mask=inside)
    else:
        tl.store(weight_ptr + index, weight, mask=inside)


# Specialized in whether `count` is a multiple of 16, which lets it read 16 bytes at once.
@triton.jit(do_not_specialize=["first", "seed"])
def _adam_kernel(
    weight_ptr, low_ptr, gradient_ptr, mean_ptr, square_ptr, mean_scale_ptr, square_scale_ptr,
    mean_table_ptr, square_table_ptr, count, first, seed,
    clip, fresh1, beta2, fresh2, epsilon, size, root, decay,
    SPLIT: tl.constexpr, STOCHASTIC: tl.constexpr, CODED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
    MEAN_LEVELS: tl.constexpr, MEAN_SLOPE: tl.constexpr, MEAN_FLOOR: tl.constexpr,
    SQUARE_LEVELS: tl.constexpr, SQUARE_SLOPE: tl.constexpr, SQUARE_FLOOR: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    index = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = index < count
    row_inside = row * BLOCK < count
    gradient = tl.load(gradient_ptr + index, mask=inside, other=0.0).to(tl.float32) * clip
    if CODED:
        code = tl.load(mean_ptr + index, mask=inside, other=0).to(tl.int32)
        scale = tl.load(mean_scale_ptr + row, mask=row_inside, other=0.0)[:, None]
        mean = tl.load(mean_table_ptr + tl.abs(code)) * scale
        mean = tl.where(code < 0, -mean, mean)
        code = tl.load(square_ptr + index, mask=inside, other=0).to(tl.int32)
        scale = tl.load(square_scale_ptr + row, mask=row_inside, other=0.0)[:, None]
        square = tl.load(square_table_ptr + code) * scale
    else:
        mean = tl.load(mean_ptr + index, mask=inside, other=0.0)
        square = tl.load(square_ptr + index, mask=inside, other=0.0)
    mean, square = _moments(gradient, mean, square, fresh1, beta2, fresh2)
    _move_weight(
        weight_ptr, low_ptr, index, first, inside, mean, square, epsilon, size, root, decay, SPLIT, STOCHASTIC
    )
    if CODED:
        chance = _noise(index + first, seed)
        scale = tl.maximum(tl.max(tl.abs(mean), 1), MEAN_FLOOR)
        code = _code(
            tl.abs(mean), scale[:, None], chance & 0xFFFF, mean_table_ptr, MEAN_LEVELS, 0, MEAN_SLOPE
        )
        code = tl.where(mean < 0, -code, tl.where(mean > 0, code, 0))
        tl.store(mean_ptr + index, code.to(tl.int8), mask=inside)
        tl.store(mean_scale_ptr + row, scale, mask=row_inside)
        scale = tl.maximum(tl.max(square, 1), SQUARE_FLOOR)
        code = _code(square, scale[:, None], chance >> 16, square_table_ptr, SQUARE_LEVELS, 1, SQUARE_SLOPE)
        tl.store(square_ptr + index, tl.where(square > 0, code, 0).to(tl.uint8), mask=inside)
        tl.store(square_scale_ptr + row, scale, mask=row_inside)
    else:
        tl.store(mean_ptr + index, mean, mask=inside)
        tl.store(square_ptr + index, square, mask=inside)


@triton.jit
def _small_kernel(
    addresses_ptr, owners_ptr, clip, fresh1, beta2, fresh2, epsilon, size, root, decay,
    SPLIT: tl.constexpr, STOCHASTIC: tl.constexpr, HALF_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    owner = tl.load(owners_ptr + 2 * tl.program_id(0)).to(tl.int64)
    addresses_ptr += 7 * owner
    index = tl.load(owners_ptr + 2 * tl.program_id(0) + 1) * BLOCK + tl.arange(0, BLOCK)
    inside = index < tl.load(addresses_ptr + 5)
    first = tl.load(addresses_ptr + 6)
    bits_type = tl.pointer_type(tl.int16 if SPLIT else tl.float32)
    weight_ptr = tl.load(addresses_ptr).to(bits_type)
    low_ptr = tl.load(addresses_ptr + 1).to(bits_type)
    gradient_ptr = tl.load(addresses_ptr + 2).to(
        tl.pointer_type(tl.bfloat16 if HALF_GRADIENT else tl.float32)
    )
    mean_ptr = tl.load(addresses_ptr + 3).to(tl.pointer_type(tl.float32))
    square_ptr = tl.load(addresses_ptr + 4).to(tl.pointer_type(tl.float32))
    gradient = tl.load(gradient_ptr + index, mask=inside, other=0.0).to(tl.float32) * clip
    mean = tl.load(mean_ptr + index, mask=inside, other=0.0)
    square = tl.load(square_ptr + index, mask=inside, other=0.0)
    mean, square = _moments(gradient, mean, square, fresh1, beta2, fresh2)
    _move_weight(
        weight_ptr, low_ptr, index, first, inside, mean, square, epsilon, size, root, decay, SPLIT, STOCHASTIC
    )
    tl.store(mean_ptr + index, mean, mask=inside)
    tl.store(square_ptr + index, square, mask=inside)


def adamw_steps(jobs: Sequence[Job]) -> None:
    """`adamw.adamw_steps` in few launches."""
    small: dict[tuple[Any, ...], list[Job]] = {}
    for job in jobs:
        if job.state.mean_scale is None and job.weight.numel() < SMALL:
            kind = (
                job.weight.dtype, job.gradient.dtype, job.state.is_stochastic,
                job.settings.step, job.settings.weight_decay, job.weight.device,
            )  # fmt: skip
            small.setdefault(kind, []).append(job)
        else:
            adamw_step(*job)
    for (weight, gradient, *_), members in small.items():
        is_split, is_half = weight == torch.bfloat16, gradient == torch.bfloat16
        _step_together(members, is_split=is_split, is_half=is_half)


@torch.no_grad()
def _step_together(jobs: list[Job], *, is_split: bool, is_half: bool) -> None:
    """Small parameters of one device, at the same step and with the same weight decay."""
    rows = []
    for weight, gradient, state, _, first in jobs:
        low_bits = weight if state.low_bits is None else state.low_bits
        tensors = (weight, low_bits, gradient, state.mean, state.square)
        rows.append([*(tensor.data_ptr() for tensor in tensors), weight.numel(), first])
    addresses = torch.tensor(rows)
    counts = addresses[:, -2]
    num_blocks = (counts + SMALL_BLOCK - 1) // SMALL_BLOCK
    owners = torch.repeat_interleave(num_blocks)
    blocks = torch.arange(len(owners)) - (num_blocks.cumsum(0) - num_blocks)[owners]
    device, settings = jobs[0].weight.device, jobs[0].settings
    _small_kernel[(len(owners),)](
        addresses.to(device), torch.stack([owners, blocks], 1).int().to(device),
        settings.clip, 1 - settings.beta1, settings.beta2, 1 - settings.beta2, settings.epsilon,
        settings.size, settings.root, settings.decay,
        SPLIT=is_split, STOCHASTIC=jobs[0].state.is_stochastic, HALF_GRADIENT=is_half, BLOCK=SMALL_BLOCK,
        num_warps=4,
    )  # fmt: skip


@torch.no_grad()
def adamw_step(weight: Tensor, gradient: Tensor, state: State, settings: AdamWStep, first: int = 0) -> None:
    """`adamw.adamw_step` in one pass."""
    count = len(weight)
    is_split, is_coded = state.low_bits is not None, state.mean_scale is not None
    weight = weight.view(torch.int16) if is_split else weight
    unused = weight  # a pointer that is not followed
    _adam_kernel[(triton.cdiv(count, ROWS * BLOCK),)](
        weight, state.low_bits if is_split else unused, gradient, state.mean, state.square,
        state.mean_scale if is_coded else unused, state.square_scale if is_coded else unused,
        table(FIRST_MOMENT, weight.device) if is_coded else unused,
        table(SECOND_MOMENT, weight.device) if is_coded else unused,
        count, first, settings.seed,
        settings.clip, 1 - settings.beta1, settings.beta2, 1 - settings.beta2, settings.epsilon,
        settings.size, settings.root, settings.decay,
        SPLIT=is_split, STOCHASTIC=state.is_stochastic, CODED=is_coded, ROWS=ROWS, BLOCK=BLOCK,
        MEAN_LEVELS=FIRST_MOMENT.levels, MEAN_SLOPE=FIRST_MOMENT.slope, MEAN_FLOOR=FIRST_MOMENT.floor,
        SQUARE_LEVELS=SECOND_MOMENT.levels, SQUARE_SLOPE=SECOND_MOMENT.slope,
        SQUARE_FLOOR=SECOND_MOMENT.floor,
        num_warps=4,
    )  # fmt: skip
