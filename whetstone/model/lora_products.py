"""Products of LoRA layers with their gradients, by hand: only A and B are trained."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HALF_DTYPES = (torch.bfloat16, torch.float16)
MAX_RANK = 256  # of all A together: a kernel has no registers for more sums


def add_product(summand: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """summand + W x, for a summand [T, out] such as the product of an adapter. Without gradients.

    The sum is rounded once. W x alone, once rounded to bf16, does not change by a summand below half a step
    of its grid, so most of a small adapter would be lost.
    """
    if x.is_cuda and x.dtype in HALF_DTYPES and type(x) is Tensor:
        # cuBLAS may round the product before `addmm` adds to it, as seen on an H200.
        return torch.mm(x, weight.t(), out_dtype=torch.float32).add_(summand).to(x.dtype)
    return torch.addmm(summand, x, weight.t())


def adapted_product(x: Tensor, inner: Tensor, weight: Tensor, up: Tensor) -> Tensor:
    """W x + B inner, rounded once: `add_product`. Without gradients."""
    if x.dtype in HALF_DTYPES and torch.compiler.is_compiling():
        return F.linear(torch.cat([x, inner], dim=1), torch.cat([weight, up], dim=1))
    return add_product(F.linear(inner, up), x, weight)


class AdaptedProduct(torch.autograd.Function):
    """W x + B inner of [T, in] and [T, r], where W is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inner: Tensor, weight: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(inner, weight, up)
        return adapted_product(x, inner, weight, up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        [gradient], [inner, weight, up] = gradients, ctx.saved_tensors
        return gradient @ weight, gradient @ up, None, gradient.T @ inner


class GroupedProduct(torch.autograd.Function):
    """[T, in] -> a [T, out] of each layer, W x + B A x, where only A and B are trained."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, down: Tensor, *matrices: Tensor) -> tuple[Tensor, ...]:
        weights, ups = matrices[: len(matrices) // 2], matrices[len(matrices) // 2 :]
        both = with_inner(x, down, scale)
        ctx.scale = scale
        ctx.save_for_backward(both, down, *matrices)
        output = F.linear(both, joined(weights, ups))
        return output.split([len(weight) for weight in weights], dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        both, down, *matrices = ctx.saved_tensors
        weights, ups = matrices[: len(matrices) // 2], matrices[len(matrices) // 2 :]
        sizes = [down.shape[1], len(down)]
        x, inner = both.split(sizes, dim=1)
        gradients, product = _product(gradients, joined(weights, ups))
        x_gradient, inner_gradient = product.split(sizes, dim=1)
        inners = inner.split([up.shape[1] for up in ups], dim=1)
        up_gradients = [out.T @ part for out, part in zip(gradients, inners, strict=True)]
        inner_gradient = inner_gradient * ctx.scale
        x_gradient = x_gradient + inner_gradient @ down
        return x_gradient, None, inner_gradient.T @ x, *[None] * len(weights), *up_gradients


class WideProduct(torch.autograd.Function):
    """[T, in] -> [T, out], W x + B A x, where only A and B are trained."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
        both = with_inner(x, down, scale)
        ctx.scale = scale
        ctx.save_for_backward(x, both[:, x.shape[1] :].contiguous(), weight, down, up)
        return F.linear(both, torch.cat([weight, up], dim=1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, inner, weight, down, up = ctx.saved_tensors
        [gradient] = gradients
        inner_gradient = (gradient @ up) * ctx.scale
        x_gradient = torch.cat([gradient, inner_gradient], dim=1) @ torch.cat([weight, down])
        return x_gradient, None, None, inner_gradient.T @ x, gradient.T @ inner


def _product(parts: tuple[Tensor, ...], matrix: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """The parts side by side, times the matrix. Wide parts are not copied together: products are summed.

    Also returns the parts, wherever they are now, so that they are not written twice.
    """
    widths = [part.shape[1] for part in parts]
    if min(widths) < matrix.shape[1] // 2:
        joined = torch.cat(parts, dim=1)
        return joined.split(widths, dim=1), joined @ matrix
    first, *others = matrix.split(widths)
    total = parts[0] @ first
    for part, rows in zip(parts[1:], others, strict=True):
        total = torch.addmm(total, part, rows)
    return parts, total


def joined(weights: Any, ups: Any) -> Tensor:
    """[[W1, B1, 0], [W2, 0, B2]]"""
    return torch.cat([torch.cat(tuple(weights)), torch.block_diag(*ups)], dim=1)


@torch.library.custom_op("whetstone::with_inner", mutates_args=())
def with_inner(x: Tensor, a: Tensor, scale: float) -> Tensor:
    """[x, scale A x], in plain torch; on a GPU it is a kernel that reads x once."""
    return _plain_with_inner(x, a, scale)


def _plain_with_inner(x: Tensor, a: Tensor, scale: float) -> Tensor:
    return torch.cat([x, F.linear(x, a) * scale], dim=1)


@with_inner.register_fake
def _(x, a, scale):
    return x.new_empty(x.shape[0], x.shape[1] + a.shape[0])


@with_inner.register_kernel("cuda")
def _(x, a, scale):
    from whetstone.model.lora_kernels import with_inner as kernel

    return kernel(x, a, scale) if len(a) <= MAX_RANK else _plain_with_inner(x, a, scale)
