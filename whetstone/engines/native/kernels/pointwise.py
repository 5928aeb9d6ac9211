"""Residual addition with RMS norm, and the gate of the MLP: what lies between the matrix products of a layer;
and the embedding of the newest tokens, before them all.

Rounding follows transformers: the sum of residual and output is rounded, the norm is computed in float32.
With `eight_bits` the result is rounded to 8 bits with a scale for each row (eight_bits.py).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from whetstone.engines.native.fp8 import LARGEST, SMALLEST_SCALE, Scaled
from whetstone.engines.native.kernels.hopper.nvrtc import can_begin_early

_LARGEST, _SMALLEST_SCALE = tl.constexpr(LARGEST), tl.constexpr(SMALLEST_SCALE)
WIDEST = 32768  # columns of a row that a program can hold


@triton.jit
def _store_rounded(x, out_ptr, scale_ptr, row, column, inside, width):
    """A whole row, which this program has."""
    scale = tl.maximum(tl.max(tl.abs(x), 0) / _LARGEST, _SMALLEST_SCALE)
    tl.store(scale_ptr + row, scale)
    x = tl.minimum(tl.maximum(x / scale, -_LARGEST), _LARGEST)
    tl.store(out_ptr + row * width + column, x.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rms(x, weight_ptr, column, inside, width, eps, OFFSET: tl.constexpr, TYPE: tl.constexpr):
    x = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if OFFSET == 0:
        return x.to(TYPE).to(tl.float32) * weight
    return x * (weight + OFFSET)


@triton.jit
def _add_norm_kernel(
    x_ptr, x_scale_ptr, residual_ptr, out_ptr, scale_ptr, weight_ptr, post_ptr, width, eps,
    PARTS: tl.constexpr, SCALED: tl.constexpr, POST: tl.constexpr, OFFSET: tl.constexpr, EIGHT: tl.constexpr,
    EARLY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < width
    TYPE: tl.constexpr = residual_ptr.dtype.element_ty
    residual = tl.load(residual_ptr + row * width + column, mask=inside, other=0.0)
    if PARTS:
        x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            place = (part * tl.num_programs(0) + row) * width + column
            x += tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            x *= tl.load(x_scale_ptr + row)
        x = x.to(TYPE).to(tl.float32)
        if POST:
            x = _rms(x, post_ptr, column, inside, width, eps, OFFSET, TYPE).to(TYPE).to(tl.float32)
        residual = (residual.to(tl.float32) + x).to(TYPE)
        tl.store(residual_ptr + row * width + column, residual, mask=inside)
    out = _rms(residual.to(tl.float32), weight_ptr, column, inside, width, eps, OFFSET, TYPE)
    if EIGHT:
        _store_rounded(out, out_ptr, scale_ptr, row, column, inside, width)
    else:
        tl.store(out_ptr + row * width + column, out.to(TYPE), mask=inside)


def add_norm(
    x: Tensor | Scaled | None,
    residual: Tensor,
    weight: Tensor,
    post: Tensor | None,
    kind: tuple,
    *,
    eight_bits: bool = False,
) -> Any:
    """residual += post_norm(x), in place; returns norm(residual), a tensor or `Scaled`. `kind` is (eps,
    offset of the weight). `x` may be the parts [k, n, width] of a sum. From Hopper on it begins while the
    kernel before it ends, and lets the next one do so.
    """
    eps, offset = kind
    num_rows, width = residual.shape
    values, x_scale = x if isinstance(x, Scaled) else (x, None)
    parts = 0 if values is None else values.numel() // residual.numel()
    out, scale = _room(num_rows, width, residual, eight_bits)
    early = can_begin_early(residual.device)
    _add_norm_kernel[(num_rows,)](
        residual if values is None else values, residual if x_scale is None else x_scale, residual, out,
        scale, weight, weight if post is None else post, width, eps,
        PARTS=parts, SCALED=x_scale is not None, POST=post is not None, OFFSET=offset, EIGHT=eight_bits,
        EARLY=early, BLOCK=triton.next_power_of_2(width),
        num_warps=16 if parts > 2 else 4 if width <= 4096 else 8, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return Scaled(out, scale) if eight_bits else out


@triton.jit
def _embed_kernel(tokens_ptr, rows_ptr, table_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    token = tl.load(tokens_ptr + tl.maximum(tl.load(rows_ptr + row), 0)).to(tl.int64)
    x = tl.load(table_ptr + token * width + column, mask=column < width)
    tl.store(out_ptr + row * width + column, x, mask=column < width)


def embed(tokens: Tensor, rows: Tensor, table: Tensor) -> Tensor:
    """table[tokens[rows]], and any row of it for those that are -1."""
    width = table.shape[1]
    out = torch.empty(len(rows), width, dtype=table.dtype, device=table.device)
    _embed_kernel[(len(rows),)](tokens, rows, table, out, width, BLOCK=triton.next_power_of_2(width))
    return out


def _room(num_rows: int, width: int, like: Tensor, eight_bits: bool) -> tuple[Tensor, Tensor]:
    """For the result and its scales; without them, any tensor serves as the second."""
    dtype = torch.float8_e4m3fn if eight_bits else like.dtype
    out = torch.empty(num_rows, width, dtype=dtype, device=like.device)
    return out, torch.empty(num_rows, device=like.device) if eight_bits else out


@triton.jit
def _gate_kernel(
    x_ptr, x_scale_ptr, out_ptr, scale_ptr, width, GELU: tl.constexpr, EIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    gate = tl.load(x_ptr + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    if EIGHT:
        x_scale = tl.load(x_scale_ptr + row)
        gate, up = gate * x_scale, up * x_scale
    if GELU:  # its tanh form
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate / (1 + tl.exp(-2 * inner))
    else:
        gate = gate / (1 + tl.exp(-gate))
    out = gate.to(TYPE).to(tl.float32) * up
    if EIGHT:
        _store_rounded(out, out_ptr, scale_ptr, row, column, inside, width)
    else:
        tl.store(out_ptr + row * width + column, out.to(TYPE), mask=inside)


def gated(x: Tensor | Scaled, *, gelu: bool) -> Any:
    """[n, 2 I] gates and values -> [n, I]; `Scaled` to `Scaled`."""
    eight_bits = isinstance(x, Scaled)
    x, x_scale = x if isinstance(x, Scaled) else (x, x)
    num_rows, width = x.shape[0], x.shape[1] // 2
    out, scale = _room(num_rows, width, x, eight_bits)
    block = triton.next_power_of_2(width)  # of the whole row, where its largest value is asked for
    assert not eight_bits or block <= WIDEST
    block = block if eight_bits else min(1024, block)
    _gate_kernel[num_rows, triton.cdiv(width, block)](
        x, x_scale, out, scale, width, GELU=gelu, EIGHT=eight_bits, BLOCK=block,
        num_warps=max(4, min(16, block // 1024)),
    )  # fmt: skip
    return Scaled(out, scale) if eight_bits else out
