"""Triton kernels for LoRA: what reads or writes a wide tensor also does its low-rank products.

These kernels wait for memory only if there are few instructions for each number: about 15 in the forward and
30 in the backward pass of a gated MLP, where a plain sigmoid and products after it take 60.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# The fastest of those tried on an H200. INNER loads nothing ahead: Triton 3.6 and 3.7 would multiply 64 rows
# asynchronously from a buffer that the next load may already overwrite, since x is also stored. While one
# program waits, others of its multiprocessor work.
INNER = {"BLOCK_ROWS": 64, "BLOCK": 128, "num_warps": 8, "num_stages": 1}
GATED_FORWARD = {"BLOCK_ROWS": 16, "BLOCK": 128, "num_warps": 4, "num_stages": 2}
GATED_BACKWARD = {"ROWS": 1024, "BLOCK_ROWS": 32, "BLOCK": 64, "num_warps": 4, "num_stages": 2}
A_BYTES = 16384  # of a block of A, several of which are in shared memory


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)) by the reciprocal of a root: one instruction, where a division takes ten."""
    root = tl.rsqrt(1 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit(do_not_specialize=["num_rows"])
def _inner_kernel(
    x_ptr, a_ptr, out_ptr, inner_ptr, num_rows, width, x_stride, out_stride, inner_stride, rank, scale,
    GATED: tl.constexpr, RANK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    number = tl.arange(0, RANK)
    total = tl.zeros((BLOCK_ROWS, RANK), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < num_rows)[:, None] & (column < width)[None, :]
        at = x_ptr + row[:, None] * x_stride + column[None, :]
        x = tl.load(at, mask=inside, other=0.0)
        if GATED:
            up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
            gate = tl.where(inside, x.to(tl.float32), 0.0)  # see _gated_kernel
            x = (gate * _sigmoid(gate) * up).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row[:, None] * out_stride + column[None, :], x, mask=inside)
        known = (column < width)[:, None] & (number < rank)[None, :]
        a = tl.load(a_ptr + number[None, :] * width + column[:, None], mask=known, other=0.0)
        total = tl.dot(x, a, total, input_precision="ieee")
    inside = (row < num_rows)[:, None] & (number < rank)[None, :]
    total = (total * scale).to(out_ptr.dtype.element_ty)
    tl.store(inner_ptr + row[:, None] * inner_stride + number[None, :], total, mask=inside)


def with_inner(x: Tensor, a: Tensor, scale: float) -> Tensor:
    """`lora_products.with_inner`: x [T, in] and A [r, in] -> [x, scale A x], [T, in + r]."""
    num_rows, width = x.shape
    out = torch.empty(num_rows, width + len(a), dtype=x.dtype, device=x.device)
    _inner(x, a, scale, out, out[:, width:], gated=False)
    return out


def gated_forward(gate_up: Tensor, a: Tensor, scale: float) -> Tensor:
    """`gated_lora.gated_forward`: [T, 2 I] -> h = silu(gate) * up beside scale A h, [T, I + r]."""
    rank, width = a.shape
    out = gate_up.new_empty(len(gate_up), width + rank)
    _inner(gate_up, a, scale, out, out[:, width:], gated=True)
    return out


def _inner(x: Tensor, a: Tensor, scale: float, out: Tensor, inner: Tensor, *, gated: bool) -> None:
    x, a = x.contiguous(), a.contiguous()
    (num_rows, _), (rank, width) = x.shape, a.shape
    sizes = inner_sizes(rank, a.element_size(), gated=gated)
    _inner_kernel[(triton.cdiv(num_rows, sizes["BLOCK_ROWS"]),)](
        x, a, out, inner, num_rows, width, x.stride(0), out.stride(0), inner.stride(0), rank, scale,
        GATED=gated, **sizes,
    )  # fmt: skip


def inner_sizes(rank: int, bytes_each: int, *, gated: bool) -> dict[str, int]:
    """Sizes of `_inner_kernel`: fewer columns at a time for a large rank or float32."""
    sizes, padded = GATED_FORWARD if gated else INNER, _padded(rank)
    return {**sizes, "RANK": padded, "BLOCK": min(sizes["BLOCK"], A_BYTES // (padded * bytes_each))}


def _padded(rank: int) -> int:
    return max(16, triton.next_power_of_2(rank))


@triton.jit(do_not_specialize=["num_rows"])
def _gated_kernel(
    gate_up_ptr, gradient_ptr, inner_ptr, down_ptr, out_ptr, sums_ptr,
    num_rows, width, inner_stride, down_stride, rank,
    ROWS: tl.constexpr, RANK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = tl.arange(0, RANK)
    first = tl.program_id(1) * ROWS
    half = out_ptr.dtype.element_ty
    gate_sum = tl.zeros((RANK, BLOCK), tl.float32)
    up_sum = tl.zeros((RANK, BLOCK), tl.float32)
    down_sum = tl.zeros((RANK, BLOCK), tl.float32)
    for start in range(first, tl.minimum(first + ROWS, num_rows), BLOCK_ROWS):
        row = (start + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        inside = (row < num_rows)[:, None] & (column < width)[None, :]
        at = row[:, None] * (2 * width) + column[None, :]
        gate = tl.load(gate_up_ptr + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + at + width, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(gradient_ptr + row[:, None] * width + column[None, :], mask=inside, other=0.0)
        gradient = gradient.to(tl.float32)
        # Changes no number. Without it the compiler computes everything that follows twice: as it is stored,
        # and from the loads again in the layout of a product's operand.
        gate = tl.where(inside, gate, 0.0)
        share = _sigmoid(gate)
        silu = gate * share
        gate_gradient = (gradient * up * (share + silu * (1 - share))).to(half)
        up_gradient = (gradient * silu).to(half)
        hidden = (silu * up).to(half)
        tl.store(out_ptr + at, gate_gradient, mask=inside)
        tl.store(out_ptr + at + width, up_gradient, mask=inside)
        # A x of gate and of up, and the gradient of down's A h, as [RANK, rows].
        known = (number < rank)[:, None] & (row < num_rows)[None, :]
        inner = inner_ptr + row[None, :] * inner_stride + number[:, None]
        gate_inner = tl.load(inner, mask=known, other=0.0)
        up_inner = tl.load(inner + rank, mask=known, other=0.0)
        down = tl.load(down_ptr + row[None, :] * down_stride + number[:, None], mask=known, other=0.0)
        gate_sum = tl.dot(gate_inner, gate_gradient, gate_sum, input_precision="ieee")
        up_sum = tl.dot(up_inner, up_gradient, up_sum, input_precision="ieee")
        down_sum = tl.dot(down, hidden, down_sum, input_precision="ieee")
    inside = (number < rank)[:, None] & (column < width)[None, :]
    sums = sums_ptr + (tl.program_id(1).to(tl.int64) * 3 * rank + number[:, None]) * width + column[None, :]
    tl.store(sums, gate_sum, mask=inside)
    tl.store(sums + rank * width, up_sum, mask=inside)
    tl.store(sums + 2 * rank * width, down_sum, mask=inside)


def gated_backward(
    gate_up: Tensor, gradient: Tensor, inner: Tensor, down_inner_gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`gated_lora.gated_backward`; a program has ROWS tokens, and its sums are added up at the end."""
    gate_up, gradient = gate_up.contiguous(), gradient.contiguous()
    num_rows, width = gradient.shape
    rank, sizes = down_inner_gradient.shape[1], GATED_BACKWARD
    num_parts = triton.cdiv(num_rows, sizes["ROWS"])
    out = torch.empty_like(gate_up)
    sums = torch.empty(num_parts, 3, rank, width, dtype=torch.float32, device=out.device)
    _gated_kernel[triton.cdiv(width, sizes["BLOCK"]), num_parts](
        gate_up, gradient, inner, down_inner_gradient, out, sums,
        num_rows, width, inner.stride(0), down_inner_gradient.stride(0), rank,
        RANK=_padded(rank), **sizes,
    )  # fmt: skip
    gate, up, down = sums.sum(0).to(out.dtype)
    return out, gate.T.contiguous(), up.T.contiguous(), down.contiguous()
