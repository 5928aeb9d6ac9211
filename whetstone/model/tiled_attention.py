"""Attention of packed segments by kernels of our own, in half precision on a Hopper GPU.

Beside torch's flash attention, which flash.py has: keys of a shared prompt are not copied, key heads are not
repeated for their query heads in the backward pass, and short segments fill the tiles, since a tile has all
query heads of a key head. What differs between batches is in three tables, so nothing is compiled anew.
Triton's part: attention_kernels.py.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from whetstone.model.attention_tiles import RUNS, lse_shape, make_tables
from whetstone.model.flash import FlashPlan
from whetstone.model.memory import upload
from whetstone.types import Segment

HEAD_DIMS = (64, 128)  # of a head
CAPABILITY = (9, 0)  # nothing else was measured, and others have less shared memory


def plan_attention(
    segments: Sequence[Segment], config: Any, head_dim: int, device: torch.device, dtype: torch.dtype
) -> "TilePlan | FlashPlan":
    """For layers on a GPU in half precision; `config`: of the text model."""
    kv_heads = getattr(config, "num_key_value_heads", None)
    is_plain = getattr(config, "sliding_window", None) is None and _num_runs(segments) <= RUNS[-1]
    if is_plain and kv_heads and has_kernels(device, dtype, head_dim):
        return TilePlan(segments, config.num_attention_heads // kv_heads, head_dim, device)
    return FlashPlan(segments, device)


def _num_runs(segments: Sequence[Segment]) -> int:
    return max(len(segment.prefix) for segment in segments)


def has_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernels are for such heads on this device."""
    is_nvidia = device.type == "cuda" and torch.version.cuda is not None  # AMD has a 9.0, too
    is_taken = dtype in (torch.bfloat16, torch.float16) and head_dim in HEAD_DIMS
    return is_nvidia and is_taken and torch.cuda.get_device_capability(device) == CAPABILITY


class TilePlan:
    """Tables of tiles, for layers with `group` query heads of dimension `head_dim` to a key head."""

    def __init__(self, segments: Sequence[Segment], group: int, head_dim: int, device: torch.device):
        self.group, self.head_dim = group, head_dim
        tables = make_tables(segments, group)
        # 0 and 1 would be constants of a graph, so neither number is that small.
        self.num_parts = max(2, 1 + int(tables[1][:, 4].max()))
        self.num_pieces = 1 + next(number for number in RUNS if _num_runs(segments) <= number)
        self.tables = [upload(torch.from_numpy(table), device) for table in tables]
        for table in self.tables:
            torch._dynamo.maybe_mark_dynamic(table, 0)  # one graph for any number of segments

    def fits(self, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> bool:
        """Whether it is for a layer with such heads."""
        is_group = query.shape[1] == self.group * key.shape[1] == self.group * value.shape[1]
        return window is None and is_group and query.shape[3] == value.shape[3] == self.head_dim

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """[1, heads, T, D] queries, [1, kv_heads, T, D] keys and values -> [1, T, heads, D]."""
        assert window is None
        return tiled_attention(query, key, value, *self.tables, self.num_pieces, self.num_parts, scale)[0]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, tiles: Tensor, items: Tensor, sums: Tensor, num_pieces: int,
    num_parts: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from whetstone.model.attention_kernels import forward

    out, lse = forward(_by_token(query), _by_token(key), _by_token(value), tiles, num_pieces, scale)
    return out[None], lse


tiled_attention = torch.library.custom_op(
    "whetstone::tiled_attention", _attend, mutates_args=(), device_types="cuda"
)


@tiled_attention.register_fake
def _(query, key, value, *_):
    query, key = (tensor[0].transpose(0, 1) for tensor in (query, key))
    return query.new_empty(query.shape)[None], query.new_empty(lse_shape(query, key), dtype=torch.float32)


@torch.library.custom_op("whetstone::tiled_attention_backward", mutates_args=(), device_types="cuda")
def tiled_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
    tiles: Tensor, items: Tensor, sums: Tensor, num_pieces: int, num_parts: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of queries, keys and values."""
    from whetstone.model.attention_kernels import backward

    query, key, value = map(_by_token, (query, key, value))
    grads = backward(
        grad[0].contiguous(), query, key, value, out[0], lse, tiles, items, sums, num_pieces, num_parts, scale
    )
    grad_query, grad_key, grad_value = (part.transpose(0, 1)[None] for part in grads)
    return grad_query, grad_key, grad_value


@tiled_attention_backward.register_fake
def _(grad, query, key, value, *_):
    return tuple(
        part.new_empty(part.shape[2], part.shape[1], part.shape[3]).transpose(0, 1)[None]
        for part in (query, key, value)
    )


def _by_token(tensor: Tensor) -> Tensor:
    """[1, heads, T, D] -> [T, heads, D], heads and numbers side by side, as a layer has them."""
    tensor = tensor[0].transpose(0, 1)
    _, heads, head_dim = tensor.shape
    _, per_head, per_number = tensor.stride()
    return tensor if per_number == 1 and (heads == 1 or per_head == head_dim) else tensor.contiguous()


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.numbers = inputs[6:]
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:6])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *tiled_attention_backward(grad, *ctx.saved_tensors, *ctx.numbers), *[None] * 6


tiled_attention.register_autograd(_backward, setup_context=_keep)
