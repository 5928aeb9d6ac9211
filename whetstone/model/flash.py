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
        query_lengths = [s.length for s in segments]
        key_lengths = [s.prefix_length + s.length for s in segments]
        self.query_bounds, self.key_bounds = (
            upload(torch.tensor([0, *lengths]).cumsum(0).int(), device)
            for lengths in (query_lengths, key_lengths)
        )
        # Numbers, not a tensor: the compiler would take everything that is computed with a tensor of the host
        # for unaligned.
        self.max_query, self.max_key = max(query_lengths), max(key_lengths)
        self.copies: Copies | None = None
        if any(s.prefix for s in segments):
            self.copies = Copies(_tokens_of_keys(segments), sum(query_lengths), device)
        for tensor in self.tensors():
            if tensor is not None:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)  # one graph for any number of segments

    def tensors(self) -> tuple[Tensor | None, ...]:
        copies = self.copies
        shared = (None, None, None) if copies is None else (copies.index, copies.order, copies.bounds)
        return (self.query_bounds, self.key_bounds, *shared)

    def fits(self, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> bool:
        """Whether it is for a layer with such heads."""
        return True

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """[1, heads, T, D] queries, [1, kv_heads, T, D] keys and values -> [1, T, heads, D]."""
        left = -1 if window is None else window - 1
        # An engine needs no operation, which takes the host 30 us.
        needs_operation = torch.is_grad_enabled() or torch.compiler.is_compiling()
        attention: Any = packed_attention if needs_operation else _attend
        return attention(query, key, value, *self.tensors(), self.max_query, self.max_key, scale, left)[0]


def _tokens_of_keys(segments: Sequence[Segment]) -> Tensor:
    """[K] the token of every key: those before each segment, then its own."""
    runs = torch.tensor([run for s in segments for run in (*s.prefix, (s.start, s.length))])
    starts, lengths = runs.unbind(1)
    ends = lengths.cumsum(0)
    return torch.arange(int(ends[-1])) + torch.repeat_interleave(starts - (ends - lengths), lengths)


class Copies:
    """Where the keys of a shared prompt go, and where their gradients come from."""

    def __init__(self, index: Tensor, num_tokens: int, device: torch.device):
        self.index = upload(index, device)  # [K] the token of every copy
        self.order = upload(index.argsort(stable=True).int(), device)
        counts = torch.bincount(index, minlength=num_tokens)
        self.bounds = upload(torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int(), device)


def _attend(
    query: Tensor, key: Tensor, value: Tensor,
    query_bounds: Tensor, key_bounds: Tensor,
    index: Tensor | None, order: Tensor | None, copy_bounds: Tensor | None,
    max_query: int, max_key: int, scale: float, left: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention [1, T, heads, D] and the logarithms of its sums [heads, T]."""
    query, key, value = map(_by_token, (query, key, value))
    if index is not None:
        key, value = key.index_select(0, index), value.index_select(0, index)
    out, sums, *_ = torch.ops.aten._flash_attention_forward(
        query.contiguous(), key, value, query_bounds, key_bounds, max_query, max_key, 0.0, False, False,
        scale=scale, window_size_left=left, window_size_right=0,
    )  # fmt: skip
    return out[None], sums


packed_attention = torch.library.custom_op(
    "whetstone::packed_attention", _attend, mutates_args=(), device_types="cuda"
)


@packed_attention.register_fake
def _(query, key, value, *_):
    _, num_heads, num_tokens, head_dim = query.shape
    sums = query.new_empty(num_heads, num_tokens, dtype=torch.float32)
    return query.new_empty(1, num_tokens, num_heads, head_dim), sums


@torch.library.custom_op("whetstone::packed_attention_backward", mutates_args=(), device_types="cuda")
def packed_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor,
    query_bounds: Tensor, key_bounds: Tensor,
    index: Tensor | None, order: Tensor | None, copy_bounds: Tensor | None,
    max_query: int, max_key: int, scale: float, left: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of queries, keys and values."""
    query, key, value = map(_by_token, (query, key, value))
    if index is not None:
        key, value = key.index_select(0, index), value.index_select(0, index)
    seed, offset = (query.new_empty(shape, dtype=torch.uint64) for shape in ((2,), ()))  # of no dropout
    grads = torch.ops.aten._flash_attention_backward(
        grad[0].contiguous(), query.contiguous(), key, value, out[0], sums, query_bounds, key_bounds,
        max_query, max_key, 0.0, False, seed, offset,
        scale=scale, window_size_left=left, window_size_right=0,
    )  # fmt: skip
    grad_query, grad_key, grad_value = grads
    if order is not None and copy_bounds is not None:
        from whetstone.model.kernels import sum_copies

        grad_key, grad_value = (sum_copies(part, copy_bounds, order) for part in (grad_key, grad_value))
    grad_query, grad_key, grad_value = (
        _by_head(part.contiguous()) for part in (grad_query, grad_key, grad_value)
    )
    return grad_query, grad_key, grad_value


@packed_attention_backward.register_fake
def _(grad, query, key, value, *_):
    return tuple(_by_head(part.new_empty(_by_token(part).shape)) for part in (query, key, value))


def _by_token(tensor: Tensor) -> Tensor:
    """[1, heads, T, D] -> [T, heads, D], which is how it lies in memory: the layer made it by a transpose."""
    return tensor[0].transpose(0, 1)


def _by_head(tensor: Tensor) -> Tensor:
    """[T, heads, D] -> [1, heads, T, D], the same memory. Other strides would be copied by the compiler."""
    return tensor.transpose(0, 1)[None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.numbers = inputs[:8], inputs[8:]
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grads = packed_attention_backward(grad, *ctx.saved_tensors, *ctx.numbers)
    return *grads, *[None] * 9


packed_attention.register_autograd(_backward, setup_context=_keep)
