"""Gradients of keys and values that several segments shared, added up: each token's in a fixed order.

The backward pass of plain indexing sorts on a GPU, or adds with atomics in whatever order comes; here every
token knows where its copies went.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sum_copies_kernel(grad_ptr, out_ptr, bounds_ptr, places_ptr, width, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for n in range(tl.load(bounds_ptr + token), tl.load(bounds_ptr + token + 1)):
        place = tl.load(places_ptr + n).to(tl.int64)
        total += tl.load(grad_ptr + place * width + column, mask=inside, other=0.0).to(tl.float32)
    out = out_ptr + token.to(tl.int64) * width + column
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=inside)


def sum_copies(grad: Tensor, bounds: Tensor, places: Tensor) -> Tensor:
    """Gradients of copies [K, ...] -> [T, ...]: those of token t are places[bounds[t]:bounds[t + 1]]."""
    grad = grad.contiguous()
    num_tokens = len(bounds) - 1
    out = torch.empty(num_tokens, *grad.shape[1:], dtype=grad.dtype, device=grad.device)
    width = out[0].numel()
    block = min(1024, triton.next_power_of_2(width))
    _sum_copies_kernel[num_tokens, triton.cdiv(width, block)](
        grad, out, bounds, places, width, BLOCK=block, num_warps=4 if block >= 512 else 2
    )
    return out
