"""Packed segments by torch's own flash attention, forwards and backwards, on a GPU in half precision.

Beside `torch.nn.attention.varlen` for three reasons: heads of keys and values are grouped in every torch
that we run on (its Python side learnt that in 2.13), the keys of a shared prompt are kept once and copied
anew for the backward pass, and their gradients are summed without sorting.

It is an operation of torch (`whetstone::packed_attention`), so a compiled layer is one graph around it. All
that differs between batches is in tensors: nothing is compiled anew.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from whetstone.model.memory import upload
from whetstone.types import Segment


class FlashPlan:
    """Which queries see which keys; queries are aligned with the end of their keys."""

    def __init__(self, segments: Sequence[Segment], device: torch.device):
        assert [s.start for s in segments] == sorted(s.start for s in segments)
        keys = [
            torch.cat([torch.arange(length) + start for start, length in (*s.prefix, (s.start, s.length))])
            for s in segments
        ]
        query_lengths, key_lengths = [s.length for s in segments], [len(index) for index in keys]
        self.query_bounds, self.key_bounds = (
            upload(torch.tensor([0, *lengths]).cumsum(0).int(), device)
            for lengths in (query_lengths, key_lengths)
        )
        self.longest = torch.tensor([max(query_lengths), max(key_lengths)])  # on the host
        self.copies: Copies | None = None
        if any(s.prefix for s in segments):
            self.copies = Copies(torch.cat(keys), sum(query_lengths), device)
        for tensor in self.tensors():
            if tensor is not None and tensor is not self.longest:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)  # one graph for any number of segments

    def tensors(self) -> tuple[Tensor | None, ...]:
        copies = self.copies
        shared = (None, None, None) if copies is None else (copies.index, copies.order, copies.bounds)
        return (self.query_bounds, self.key_bounds, self.longest, *shared)


class Copies:
    """Where the keys of a shared prompt go, and where their gradients come from."""

    def __init__(self, index: Tensor, num_tokens: int, device: torch.device):
        self.index = upload(index, device)  # [K] the token of every copy
        self.order = upload(index.argsort(stable=True).int(), device)
        counts = torch.bincount(index, minlength=num_tokens)
        self.bounds = upload(torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int(), device)


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: FlashPlan, *, scale: float, window: int | None
) -> Tensor:
    """[T, heads, D] queries, [T, kv_heads, D] keys and values -> [T, heads, D]."""
    out, _ = packed_attention(query, key, value, *plan.tensors(), scale, -1 if window is None else window - 1)
    return out


@torch.library.custom_op("whetstone::packed_attention", mutates_args=(), device_types="cuda")
def packed_attention(
    query: Tensor, key: Tensor, value: Tensor,
    query_bounds: Tensor, key_bounds: Tensor, longest: Tensor,
    index: Tensor | None, order: Tensor | None, copy_bounds: Tensor | None,
    scale: float, left: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention [T, heads, D] and the logarithms of its sums [heads, T]."""
    if index is not None:
        key, value = key.index_select(0, index), value.index_select(0, index)
    max_query, max_key = longest.tolist()
    out, sums, *_ = torch.ops.aten._flash_attention_forward(
        query.contiguous(), key, value, query_bounds, key_bounds, max_query, max_key, 0.0, False, False,
        scale=scale, window_size_left=left, window_size_right=0,
    )  # fmt: skip
    return out, sums


@packed_attention.register_fake
def _(query, key, value, query_bounds, key_bounds, longest, index, order, copy_bounds, scale, left):
    num_tokens, num_heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty(num_heads, num_tokens, dtype=torch.float32)


@torch.library.custom_op("whetstone::packed_attention_backward", mutates_args=(), device_types="cuda")
def packed_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor,
    query_bounds: Tensor, key_bounds: Tensor, longest: Tensor,
    index: Tensor | None, order: Tensor | None, copy_bounds: Tensor | None,
    scale: float, left: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of queries, keys and values."""
    if index is not None:
        key, value = key.index_select(0, index), value.index_select(0, index)
    max_query, max_key = longest.tolist()
    seed, offset = (query.new_empty(shape, dtype=torch.uint64) for shape in ((2,), ()))  # of no dropout
    grads = torch.ops.aten._flash_attention_backward(
        grad.contiguous(), query.contiguous(), key, value, out, sums, query_bounds, key_bounds,
        max_query, max_key, 0.0, False, seed, offset,
        scale=scale, window_size_left=left, window_size_right=0,
    )  # fmt: skip
    grad_query, grad_key, grad_value = grads
    if order is not None and copy_bounds is not None:
        from whetstone.model.kernels import sum_copies

        grad_key, grad_value = (sum_copies(part, copy_bounds, order) for part in (grad_key, grad_value))
    return grad_query.contiguous(), grad_key.contiguous(), grad_value.contiguous()


@packed_attention_backward.register_fake
def _(grad, query, key, value, *_):
    return tuple(part.new_empty(part.shape) for part in (query, key, value))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.left = inputs
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grads = packed_attention_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.left)
    return *grads, *[None] * 8


packed_attention.register_autograd(_backward, setup_context=_keep)
