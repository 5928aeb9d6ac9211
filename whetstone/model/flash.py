"""Packed segments by torch's own flash attention, forwards and backwards, on a GPU in half precision.

Beside `torch.nn.attention.varlen` for three reasons: heads of keys and values are grouped in every torch
that we run on (its Python side learnt that in 2.13), the keys of a shared prompt are kept once and copied
anew for the backward pass, and their gradients are summed without sorting.
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
        self.max_query, self.max_key = max(query_lengths), max(key_lengths)
        self.copies: Copies | None = None
        if any(s.prefix for s in segments):
            self.copies = Copies(torch.cat(keys), sum(query_lengths), device)


class Copies:
    """Where the keys of a shared prompt go, and where their gradients come from."""

    def __init__(self, index: Tensor, num_tokens: int, device: torch.device):
        self.index = upload(index, device)  # [K] the token of every copy
        self.order = upload(index.argsort(stable=True).int(), device)
        counts = torch.bincount(index, minlength=num_tokens)
        self.bounds = upload(torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int(), device)

    def select(self, rows: Tensor) -> Tensor:
        return rows.index_select(0, self.index)

    def sum_gradients(self, grad: Tensor) -> Tensor:
        from whetstone.model.kernels import sum_copies

        return sum_copies(grad, self.bounds, self.order)


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: FlashPlan, *, scale: float, window: int | None
) -> Tensor:
    """[T, heads, D] queries, [T, kv_heads, D] keys and values -> [T, heads, D]."""
    return _Flash.apply(query, key, value, plan, scale, -1 if window is None else window - 1)  # type: ignore


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query, key, value, plan: FlashPlan, scale: float, left: int) -> Tensor:
        copies = plan.copies
        keys, values = (key, value) if copies is None else (copies.select(key), copies.select(value))
        out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
            query, keys, values, plan.query_bounds, plan.key_bounds, plan.max_query, plan.max_key,
            0.0, False, False,
            scale=scale, window_size_left=left, window_size_right=0,
        )  # fmt: skip
        ctx.save_for_backward(query, key, value, out, lse, state, unused)
        ctx.plan, ctx.scale, ctx.left = plan, scale, left
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        query, key, value, out, lse, state, unused = ctx.saved_tensors
        plan: FlashPlan = ctx.plan
        copies = plan.copies
        keys, values = (key, value) if copies is None else (copies.select(key), copies.select(value))
        grads = torch.ops.aten._flash_attention_backward(
            grad.contiguous(), query, keys, values, out, lse, plan.query_bounds, plan.key_bounds,
            plan.max_query, plan.max_key, 0.0, False, state, unused,
            scale=ctx.scale, window_size_left=ctx.left, window_size_right=0,
        )  # fmt: skip
        grad_query, grad_key, grad_value = grads
        if copies is not None:
            grad_key, grad_value = copies.sum_gradients(grad_key), copies.sum_gradients(grad_value)
        return grad_query, grad_key, grad_value, None, None, None
