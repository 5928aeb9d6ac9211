"""`whetstone::packed_attention` and `whetstone::tiled_attention` on a CPU, segment by segment in plain torch:
what a GPU has kernels for.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from whetstone.model import flash, tiled_attention
from whetstone.model.attention_tiles import lse_shape

Segments = Iterator[tuple[slice, Tensor]]  # the queries of a segment, and the tokens of all of its keys


@flash.packed_attention.register_kernel("cpu")
def forward(query: Tensor, key: Tensor, value: Tensor, *plan) -> tuple[Tensor, Tensor]:
    *_, scale, left = plan
    out = attend(query, key, value, _packed(*plan), scale, left)
    return out, out.new_zeros(query.shape[1:3])


@flash.packed_attention_backward.register_kernel("cpu")
def backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, *plan):
    *_, scale, left = plan
    return gradients(grad, query, key, value, _packed(*plan), scale, left)


@tiled_attention.tiled_attention.register_kernel("cpu")
def tiled_forward(query: Tensor, key: Tensor, value: Tensor, *plan) -> tuple[Tensor, Tensor]:
    shape = lse_shape(*(tensor[0].transpose(0, 1) for tensor in (query, key)))
    return attend(query, key, value, _tiled(*plan), plan[-1], -1), query.new_zeros(shape)


@tiled_attention.tiled_attention_backward.register_kernel("cpu")
def tiled_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *plan):
    return gradients(grad, query, key, value, _tiled(*plan), plan[-1], -1)


def attend(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float, left: int) -> Tensor:
    """[1, heads, T, D] -> [1, T, heads, D]."""
    out = query.new_zeros(query.shape)[0].transpose(0, 1)
    for rows, keys in segments:
        _, _, v, weights = _weights(query, key, value, rows, keys, scale, left)
        out[rows] = (weights @ v).transpose(0, 1)
    return out[None].contiguous()


def gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float, left: int
) -> tuple[Tensor, ...]:
    grads = [torch.zeros_like(tensor[0].transpose(0, 1)) for tensor in (query, key, value)]
    for rows, keys in segments:
        q, k, v, weights = _weights(query, key, value, rows, keys, scale, left)
        g = grad[0, rows].transpose(0, 1)
        pull = g @ v.transpose(1, 2)
        scores = weights * (pull - (pull * weights).sum(-1, keepdim=True)) * scale
        grads[0][rows] = (scores @ k).transpose(0, 1)
        for number, part in ((1, scores.transpose(1, 2) @ q), (2, weights.transpose(1, 2) @ g)):
            part = part.transpose(0, 1)
            part = part.reshape(len(part), key.shape[1], -1, part.shape[-1]).sum(2)
            grads[number].index_add_(0, keys, part)
    return tuple(part.contiguous().transpose(0, 1)[None] for part in grads)


def _weights(query, key, value, rows: slice, keys: Tensor, scale: float, left: int):
    """[heads, length, D] queries, keys and values of a segment, and [heads, queries, keys] weights."""
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    groups = q.shape[1] // k.shape[1]
    q, k, v = q[rows], *(part[keys].repeat_interleave(groups, dim=1) for part in (k, v))
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))[None]
    seen = (distance >= 0) & ((left < 0) | (distance <= left))
    q, k, v = (tensor.transpose(0, 1) for tensor in (q, k, v))
    scores = q @ k.transpose(1, 2) * scale
    return q, k, v, scores.masked_fill(~seen, float("-inf")).softmax(-1)


def _packed(query_bounds, key_bounds, index, _order, _bounds, *numbers) -> Segments:
    *longest, _, _ = numbers
    assert longest == [int(bounds.diff().max()) for bounds in (query_bounds, key_bounds)]
    index = torch.arange(int(key_bounds[-1])) if index is None else index
    for row in range(len(query_bounds) - 1):
        yield slice(*query_bounds[row : row + 2].tolist()), index[key_bounds[row] : key_bounds[row + 1]]


def _tiled(tiles, _items, _sums, _num_pieces, _num_parts, _scale) -> Segments:
    for end, start, before, *runs in tiles[:, 1:].unique(dim=0).tolist():
        keys, first = [], 0
        for begin, last in zip(runs[::2], runs[1::2], strict=False):
            keys.append(torch.arange(begin, begin + last - first))
            first = last
        assert first == before
        yield slice(start, end), torch.cat([*keys, torch.arange(start, end)])
