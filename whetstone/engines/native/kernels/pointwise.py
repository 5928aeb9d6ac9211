"""Residual addition with RMS norm, and the gate of the MLP: what lies between the matrix products of a layer.

Rounding follows transformers: the sum of residual and output is rounded, the norm is computed in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms(x, weight_ptr, column, inside, width, eps, OFFSET: tl.constexpr, TYPE: tl.constexpr):
    x = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if OFFSET == 0:
        return x.to(TYPE).to(tl.float32) * weight
    return x * (weight + OFFSET)


@triton.jit
def _add_norm_kernel(
    x_ptr, residual_ptr, out_ptr, weight_ptr, post_ptr, width, eps,
    PARTS: tl.constexpr, POST: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < width
    TYPE: tl.constexpr = residual_ptr.dtype.element_ty
    residual = tl.load(residual_ptr + row * width + column, mask=inside, other=0.0)
    if PARTS:
        x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            place = (part * tl.num_programs(0) + row) * width + column
            x += tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        x = x.to(TYPE).to(tl.float32)
        if POST:
            x = _rms(x, post_ptr, column, inside, width, eps, OFFSET, TYPE).to(TYPE).to(tl.float32)
        residual = (residual.to(tl.float32) + x).to(TYPE)
        tl.store(residual_ptr + row * width + column, residual, mask=inside)
    out = _rms(residual.to(tl.float32), weight_ptr, column, inside, width, eps, OFFSET, TYPE)
    tl.store(out_ptr + row * width + column, out.to(TYPE), mask=inside)


def add_norm(x: Tensor | None, residual: Tensor, weight: Tensor, post: Tensor | None, kind: tuple) -> Tensor:
    """residual += post_norm(x), in place; returns norm(residual). `kind` is (eps, offset of the weight).
    `x` may be the parts [k, n, width] of a sum.
    """
    eps, offset = kind
    out = torch.empty_like(residual)
    num_rows, width = residual.shape
    parts = 0 if x is None else x.numel() // residual.numel()
    _add_norm_kernel[(num_rows,)](
        residual if x is None else x, residual, out, weight, weight if post is None else post, width, eps,
        PARTS=parts, POST=post is not None, OFFSET=offset, BLOCK=triton.next_power_of_2(width),
        num_warps=4 if width <= 4096 else 8,
    )  # fmt: skip
    return out


@triton.jit
def _gate_kernel(x_ptr, out_ptr, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    gate = tl.load(x_ptr + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    if GELU:  # its tanh form
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate / (1 + tl.exp(-2 * inner))
    else:
        gate = gate / (1 + tl.exp(-gate))
    out = gate.to(TYPE).to(tl.float32) * up
    tl.store(out_ptr + row * width + column, out.to(TYPE), mask=inside)


def gated(x: Tensor, *, gelu: bool) -> Tensor:
    """[n, 2 I] gates and values -> [n, I]."""
    num_rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(width))
    _gate_kernel[num_rows, triton.cdiv(width, block)](x, out, width, GELU=gelu, BLOCK=block, num_warps=4)
    return out
