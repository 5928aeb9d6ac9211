"""Packed segments, and attention to them in plain float64."""

from collections.abc import Sequence

import torch
from torch import Tensor

from whetstone.types import Segment

# Prompts of 6 and 9 tokens, each with completions of very different lengths, and sequences for themselves.
SHARED = [
    Segment(0, 6), Segment(6, 1, ((0, 6),)), Segment(7, 40, ((0, 6),)), Segment(47, 3, ((0, 6),)),
    Segment(50, 9), Segment(59, 17, ((50, 9),)), Segment(76, 2, ((50, 9),)), Segment(78, 31), Segment(109, 4),
]  # fmt: skip
# A prompt with a sequence; others share parts of both, and parts of one another.
BRANCHES = [
    Segment(0, 6), Segment(6, 9, ((0, 6),)), Segment(15, 3, ((0, 6), (6, 4))), Segment(18, 7),
    Segment(25, 11, ((0, 6), (6, 4), (15, 2))), Segment(36, 2, ((18, 3),)), Segment(38, 1, ((0, 2),)),
    Segment(39, 20, ((0, 6), (6, 4), (15, 2), (25, 7))),
]  # fmt: skip


def gradients(
    query: Tensor, key: Tensor, value: Tensor, pull: Tensor, segments: Sequence[Segment], scale: float
) -> list[Tensor]:
    """From [T, heads, D] queries, [T, kv_heads, D] keys and values: [T, heads, D], and the gradients of all
    three where that of the result is `pull` [1, T, heads, D].
    """
    q, k, v = (tensor.detach().double().requires_grad_() for tensor in (query, key, value))
    out = attend(q, k, v, segments, scale)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), pull[0].double())]


def attend(
    query: Tensor, key: Tensor, value: Tensor, segments: Sequence[Segment], scale: float,
    window: int | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """[T, heads, D], segment by segment."""
    outs, group = [], query.shape[1] // key.shape[1]
    for segment in segments:
        runs = (*segment.prefix, (segment.start, segment.length))
        index = torch.cat([torch.arange(start, start + length) for start, length in runs]).to(query.device)
        queries = query[segment.start : segment.start + segment.length].transpose(0, 1)
        keys, values = (part[index].repeat_interleave(group, 1).transpose(0, 1) for part in (key, value))
        position = torch.arange(len(index), device=query.device)
        distance = position[len(index) - segment.length :, None] - position[None]
        seen = (distance >= 0) & (distance < (window or len(index)))
        scores = queries @ keys.transpose(1, 2) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        outs.append((scores.masked_fill(~seen, float("-inf")).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(outs)
