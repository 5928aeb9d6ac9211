"""Attention of packed segments in plain float64, and its gradients."""

from collections.abc import Sequence

import torch
from torch import Tensor

from whetstone.types import Segment


def expected(
    query: Tensor, key: Tensor, value: Tensor, pull: Tensor, segments: Sequence[Segment], scale: float
) -> list[Tensor]:
    """From [T, heads, D] queries, [T, kv_heads, D] keys and values: [T, heads, D], and the gradients of all
    three where that of the result is `pull` [1, T, heads, D].
    """
    q, k, v = (tensor.detach().double().requires_grad_() for tensor in (query, key, value))
    out = attend(q, k, v, segments, scale)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), pull[0].double())]


def attend(query: Tensor, key: Tensor, value: Tensor, segments: Sequence[Segment], scale: float) -> Tensor:
    outs, group = [], query.shape[1] // key.shape[1]
    for segment in segments:
        runs = (*segment.prefix, (segment.start, segment.length))
        index = torch.cat([torch.arange(start, start + length) for start, length in runs]).to(query.device)
        queries = query[segment.start : segment.start + segment.length].transpose(0, 1)
        keys, values = (part[index].repeat_interleave(group, 1).transpose(0, 1) for part in (key, value))
        position = torch.arange(len(index), device=query.device)
        seen = position[None] <= position[len(index) - segment.length :, None]
        scores = (queries @ keys.transpose(1, 2) * scale).masked_fill(~seen, float("-inf"))
        outs.append((scores.softmax(-1) @ values).transpose(0, 1))
    return torch.cat(outs)
