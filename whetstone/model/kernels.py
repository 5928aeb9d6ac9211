"""Triton kernels for GPUs: statistics of logits and their gradient, sums of copied keys, 4-bit weights.

`z` are the logits as the loss sees them: bent by a softcap where the model has one, then multiplied by
`scale` (1 / temperature). Everything is computed in float32, whatever the logits are stored in.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _bend(x, cap, CAP: tl.constexpr):
    if CAP:
        # tanh by exp of a negative number: it can't overflow.
        e = tl.exp(-2 * tl.abs(x / cap))
        x = cap * tl.where(x < 0, -1.0, 1.0) * (1 - e) / (1 + e)
    return x


@triton.jit
def _load_z(base, column, width, scale, cap, CAP: tl.constexpr):
    """z, 0 beyond the end of the row; and z, -inf there."""
    inside = column < width
    z = _bend(tl.load(base + column, mask=inside, other=0.0).to(tl.float32), cap, CAP) * scale
    return z, tl.where(inside, z, float("-inf"))


@triton.jit
def _statistics_kernel(
    logits_ptr, targets_ptr, logprobs_ptr, entropy_ptr, lse_ptr, width, stride, scale, cap,
    CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = logits_ptr + row * stride
    column = tl.arange(0, BLOCK)
    # Running maximum, sum of exponentials, and sum of exponentials times z, of every lane: one reduction at
    # the end. Four loads at a time: what was summed before is scaled once for all of them.
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, 4 * BLOCK):
        a, a_top = _load_z(base, start + column, width, scale, cap, CAP)
        b, b_top = _load_z(base, start + BLOCK + column, width, scale, cap, CAP)
        c, c_top = _load_z(base, start + 2 * BLOCK + column, width, scale, cap, CAP)
        d, d_top = _load_z(base, start + 3 * BLOCK + column, width, scale, cap, CAP)
        higher = tl.maximum(top, tl.maximum(tl.maximum(a_top, b_top), tl.maximum(c_top, d_top)))
        # Lanes that have seen nothing but padding would hold -inf - -inf.
        reference = tl.where(higher == float("-inf"), 0.0, higher)
        old = tl.exp(top - reference)
        a_new, b_new = tl.exp(a_top - reference), tl.exp(b_top - reference)
        c_new, d_new = tl.exp(c_top - reference), tl.exp(d_top - reference)
        total = total * old + ((a_new + b_new) + (c_new + d_new))
        weighted = weighted * old + ((a_new * a + b_new * b) + (c_new * c + d_new * d))
        top = higher
    highest = tl.max(top, 0)
    factor = tl.where(top == float("-inf"), 0.0, tl.exp(top - highest))
    total_row = tl.sum(total * factor, 0)
    lse = highest + tl.log(total_row)
    target = tl.load(targets_ptr + row)
    chosen = _bend(tl.load(base + target).to(tl.float32), cap, CAP) * scale
    tl.store(logprobs_ptr + row, chosen - lse)
    tl.store(entropy_ptr + row, lse - tl.sum(weighted * factor, 0) / total_row)
    tl.store(lse_ptr + row, lse)


@triton.jit
def _gradient_kernel(
    logits_ptr, targets_ptr, lse_ptr, entropy_ptr, grad_logprobs_ptr, grad_entropy_ptr,
    width, stride, scale, cap,
    CAP: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = logits_ptr + row * stride + column
    x = _bend(tl.load(at, mask=inside, other=0.0).to(tl.float32), cap, CAP)
    logprob = x * scale - tl.load(lse_ptr + row)
    p = tl.exp(logprob)
    chosen = column == tl.load(targets_ptr + row)
    grad = tl.load(grad_logprobs_ptr + row) * (tl.where(chosen, 1.0, 0.0) - p)
    if ENTROPY:
        grad -= tl.load(grad_entropy_ptr + row) * p * (logprob + tl.load(entropy_ptr + row))
    grad *= scale
    if CAP:
        grad *= 1 - (x / cap) * (x / cap)
    tl.store(at, grad.to(logits_ptr.dtype.element_ty), mask=inside)


def row_statistics(
    logits: Tensor, targets: Tensor, scale: float, softcap: float | None, out: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Logprob of the target, entropy, and log-sum-exp of every row [n, V] into the three of `out` [n]."""
    rows, width = logits.shape
    _statistics_kernel[(rows,)](
        logits, targets, *out, width, logits.stride(0), scale, softcap or 1.0,
        CAP=softcap is not None, BLOCK=min(2048, triton.next_power_of_2(width)), num_warps=8,
    )  # fmt: skip


def logits_to_gradient(
    logits: Tensor, targets: Tensor, lse: Tensor, entropy: Tensor, grads: tuple[Tensor, Tensor | None],
    scale: float, softcap: float | None,
) -> None:  # fmt: skip
    """Replace logits [n, V] by the gradient of what `grads` (of logprobs and of entropies, [n]) weigh."""
    rows, width = logits.shape
    block = min(4096, triton.next_power_of_2(width))
    grad_logprobs, grad_entropy = grads
    _gradient_kernel[rows, triton.cdiv(width, block)](
        logits, targets, lse, entropy, grad_logprobs, grad_logprobs if grad_entropy is None else grad_entropy,
        width, logits.stride(0), scale, softcap or 1.0,
        CAP=softcap is not None, ENTROPY=grad_entropy is not None, BLOCK=block, num_warps=8,
    )  # fmt: skip


@triton.jit
def _sum_copies_kernel(grad_ptr, out_ptr, bounds_ptr, order_ptr, width, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for n in range(tl.load(bounds_ptr + token), tl.load(bounds_ptr + token + 1)):
        copy = tl.load(order_ptr + n).to(tl.int64)
        total += tl.load(grad_ptr + copy * width + column, mask=inside, other=0.0).to(tl.float32)
    out = out_ptr + token.to(tl.int64) * width + column
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside)


def sum_copies(grad: Tensor, bounds: Tensor, order: Tensor) -> Tensor:
    """Gradients of copies [K, ...] -> [T, ...]: those of token t are order[bounds[t]:bounds[t + 1]].

    In a fixed order: the backward pass of plain indexing sorts on a GPU, or adds with atomics.
    """
    grad = grad.contiguous()
    num_tokens = len(bounds) - 1
    out = torch.empty(num_tokens, *grad.shape[1:], dtype=grad.dtype, device=grad.device)
    width = out[0].numel()
    block = min(1024, triton.next_power_of_2(width))
    _sum_copies_kernel[num_tokens, triton.cdiv(width, block)](
        grad, out, bounds, order, width, BLOCK=block, num_warps=4 if block >= 512 else 2
    )
    return out


@triton.jit
def _dequantize_nf4_kernel(codes_ptr, scales_ptr, levels_ptr, out_ptr, size, BLOCK: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = byte < size
    code = tl.load(codes_ptr + byte, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales_ptr + byte // 32, mask=inside, other=0.0)
    first = tl.load(levels_ptr + (code >> 4)) * scale
    second = tl.load(levels_ptr + (code & 15)) * scale
    weight = tl.program_id(0).to(tl.int64) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    values = tl.interleave(first, second).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + weight, values, mask=weight < 2 * size)


def dequantize_nf4(codes: Tensor, scales: Tensor, levels: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes [N, K / 2], two to a byte, and a scale for each 64 weights -> [N, K]."""
    out = torch.empty(codes.shape[0], 2 * codes.shape[1], dtype=dtype, device=codes.device)
    size, block = codes.numel(), 1024
    _dequantize_nf4_kernel[(triton.cdiv(size, block),)](
        codes, scales, levels, out, size, BLOCK=block, num_warps=4
    )
    return out
