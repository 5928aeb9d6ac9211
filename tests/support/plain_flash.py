"""`whetstone::packed_attention` on a CPU, segment by segment in plain torch: what a GPU has a kernel for."""

import torch
from torch import Tensor

from whetstone.model import flash


@flash.packed_attention.register_kernel("cpu")
def forward(query: Tensor, key: Tensor, value: Tensor, *plan) -> tuple[Tensor, Tensor]:
    out = torch.cat([weights @ v for _, _, v, weights in _segments(query, key, value, *plan)], 1)
    return out.transpose(0, 1)[None].contiguous(), out.new_zeros(out.shape[:2])


@flash.packed_attention_backward.register_kernel("cpu")
def backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, *plan):
    _, _, index, *_, scale, _ = plan
    parts, start = [], 0
    for q, k, v, weights in _segments(query, key, value, *plan):
        g = grad[0, start : start + q.shape[1]].transpose(0, 1)
        pull = g @ v.transpose(1, 2)
        scores = weights * (pull - (pull * weights).sum(-1, keepdim=True)) * scale
        parts.append((scores @ k, scores.transpose(1, 2) @ q, weights.transpose(1, 2) @ g))
        start += q.shape[1]
    grads = [torch.cat(part, 1).transpose(0, 1).contiguous() for part in zip(*parts, strict=True)]
    for number, like in ((1, key), (2, value)):
        like = like[0].transpose(0, 1)
        summed = grads[number].view(len(grads[number]), like.shape[1], -1, like.shape[2]).sum(2)
        grads[number] = summed if index is None else like.new_zeros(like.shape).index_add(0, index, summed)
    return tuple(part.transpose(0, 1)[None] for part in grads)


def _segments(query, key, value, query_bounds, key_bounds, index, _order, _bounds, *numbers):
    """[heads, length, D] queries, keys and values of each segment, and [heads, queries, keys] weights."""
    *longest, scale, left = numbers
    assert longest == [int(bounds.diff().max()) for bounds in (query_bounds, key_bounds)]
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if index is not None:
        key, value = key[index], value[index]
    groups = query.shape[1] // key.shape[1]
    for row in range(len(query_bounds) - 1):
        q = query[query_bounds[row] : query_bounds[row + 1]]
        k, v = (tensor[key_bounds[row] : key_bounds[row + 1]] for tensor in (key, value))
        k, v = (tensor.repeat_interleave(groups, dim=1) for tensor in (k, v))
        distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))[None]
        seen = (distance >= 0) & ((left < 0) | (distance <= left))
        q, k, v = (tensor.transpose(0, 1) for tensor in (q, k, v))
        scores = q @ k.transpose(1, 2) * scale
        yield q, k, v, scores.masked_fill(~seen, float("-inf")).softmax(-1)
