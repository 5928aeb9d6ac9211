"""Pointwise kernels of a layer: residual addition with RMS norm, the MLP's gate; and the token embedding.

Rounding follows transformers: the residual sum is rounded, the norm is computed in float32. With `fp8` the
result is quantized to FP8 with one scale per row (fp8.py).
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from whetstone.engines.native.fp8 import FP8_MAX, MIN_SCALE, ScaledTensor

_FP8_MAX, _MIN_SCALE = tl.constexpr(FP8_MAX), tl.constexpr(MIN_SCALE)
MAX_WIDTH = 32768  # columns that one program can hold


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Whether programmatic dependent launch is supported: a kernel starts before the last one has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def _store_fp8(x, out_ptr, scale_ptr, row, column, mask, width):
    """Quantize and store a whole row."""
    scale = tl.maximum(tl.max(tl.abs(x), 0) / _FP8_MAX, _MIN_SCALE)
    tl.store(scale_ptr + row, scale)
    x = tl.minimum(tl.maximum(x / scale, -_FP8_MAX), _FP8_MAX)
    tl.store(out_ptr + row * width + column, x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rms(x, weight_ptr, column, mask, width, eps, OFFSET: tl.constexpr, TYPE: tl.constexpr):
    x = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if OFFSET == 0:
        return x.to(TYPE).to(tl.float32) * weight
    return x * (weight + OFFSET)


@triton.jit
def _add_norm_kernel(
    x_ptr, x_scale_ptr, residual_ptr, out_ptr, scale_ptr, weight_ptr, post_ptr, width, eps,
    SPLITS: tl.constexpr, SCALED: tl.constexpr, POST: tl.constexpr, OFFSET: tl.constexpr, FP8: tl.constexpr,
    PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    mask = column < width
    TYPE: tl.constexpr = residual_ptr.dtype.element_ty
    residual = tl.load(residual_ptr + row * width + column, mask=mask, other=0.0)
    if SPLITS:
        x = tl.load(x_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
        for split in tl.static_range(1, SPLITS):
            offset = (split * tl.num_programs(0) + row) * width + column
            x += tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        if SCALED:
            x *= tl.load(x_scale_ptr + row)
        x = x.to(TYPE).to(tl.float32)
        if POST:
            x = _rms(x, post_ptr, column, mask, width, eps, OFFSET, TYPE).to(TYPE).to(tl.float32)
        residual = (residual.to(tl.float32) + x).to(TYPE)
        tl.store(residual_ptr + row * width + column, residual, mask=mask)
    out = _rms(residual.to(tl.float32), weight_ptr, column, mask, width, eps, OFFSET, TYPE)
    if FP8:
        _store_fp8(out, out_ptr, scale_ptr, row, column, mask, width)
    else:
        tl.store(out_ptr + row * width + column, out.to(TYPE), mask=mask)


def add_norm(
    x: Tensor | ScaledTensor | None,
    residual: Tensor,
    weight: Tensor,
    post: Tensor | None,
    kind: tuple,
    *,
    fp8: bool = False,
) -> Any:
    """residual += post_norm(x), in place; returns norm(residual), a tensor or `ScaledTensor`. `kind` is (eps,
    offset of the weight). `x` may be split-K partial sums [k, n, width]. Uses programmatic dependent launch
    (PDL) from Hopper on.
    """
    eps, offset = kind
    num_rows, width = residual.shape
    values, x_scale = x if isinstance(x, ScaledTensor) else (x, None)
    num_splits = 0 if values is None else values.numel() // residual.numel()
    out, scale = _empty_outputs(num_rows, width, residual, fp8)
    pdl = supports_pdl(residual.device)
    _add_norm_kernel[(num_rows,)](
        residual if values is None else values, residual if x_scale is None else x_scale, residual, out,
        scale, weight, weight if post is None else post, width, eps,
        SPLITS=num_splits, SCALED=x_scale is not None, POST=post is not None, OFFSET=offset, FP8=fp8,
        PDL=pdl, BLOCK=triton.next_power_of_2(width),
        num_warps=16 if num_splits > 2 else 4 if width <= 4096 else 8,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return ScaledTensor(out, scale) if fp8 else out


@triton.jit
def _embed_kernel(tokens_ptr, rows_ptr, table_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    token = tl.load(tokens_ptr + tl.maximum(tl.load(rows_ptr + row), 0)).to(tl.int64)
    x = tl.load(table_ptr + token * width + column, mask=column < width)
    tl.store(out_ptr + row * width + column, x, mask=column < width)


def embed(tokens: Tensor, rows: Tensor, table: Tensor) -> Tensor:
    """table[tokens[rows]]; an arbitrary row where `rows` is -1."""
    width = table.shape[1]
    out = torch.empty(len(rows), width, dtype=table.dtype, device=table.device)
    _embed_kernel[(len(rows),)](tokens, rows, table, out, width, BLOCK=triton.next_power_of_2(width))
    return out


def _empty_outputs(num_rows: int, width: int, like: Tensor, fp8: bool) -> tuple[Tensor, Tensor]:
    """The result and its scales; the second is a dummy without `fp8`."""
    dtype = torch.float8_e4m3fn if fp8 else like.dtype
    out = torch.empty(num_rows, width, dtype=dtype, device=like.device)
    return out, torch.empty(num_rows, device=like.device) if fp8 else out


@triton.jit
def _gate_kernel(
    x_ptr, x_scale_ptr, out_ptr, scale_ptr, width, GELU: tl.constexpr, FP8: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    gate = tl.load(x_ptr + row * 2 * width + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + column, mask=mask, other=0.0).to(tl.float32)
    if FP8:
        x_scale = tl.load(x_scale_ptr + row)
        gate, up = gate * x_scale, up * x_scale
    if GELU:  # its tanh form
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate / (1 + tl.exp(-2 * inner))
    else:
        gate = gate / (1 + tl.exp(-gate))
    out = gate.to(TYPE).to(tl.float32) * up
    if FP8:
        _store_fp8(out, out_ptr, scale_ptr, row, column, mask, width)
    else:
        tl.store(out_ptr + row * width + column, out.to(TYPE), mask=mask)


def gated(x: Tensor | ScaledTensor, *, gelu: bool) -> Any:
    """[n, 2 I] gates and values -> [n, I]; `ScaledTensor` to `ScaledTensor`."""
    fp8 = isinstance(x, ScaledTensor)
    x, x_scale = x if isinstance(x, ScaledTensor) else (x, x)
    num_rows, width = x.shape[0], x.shape[1] // 2
    out, scale = _empty_outputs(num_rows, width, x, fp8)
    block = triton.next_power_of_2(width)  # the whole row, where its maximum is needed
    assert not fp8 or block <= MAX_WIDTH
    block = block if fp8 else min(1024, block)
    _gate_kernel[num_rows, triton.cdiv(width, block)](
        x, x_scale, out, scale, width, GELU=gelu, FP8=fp8, BLOCK=block,
        num_warps=max(4, min(16, block // 1024)),
    )  # fmt: skip
    return ScaledTensor(out, scale) if fp8 else out
