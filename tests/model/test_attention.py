"""Attention inside segments laid end to end, beside a plain one in float64, whatever their lengths."""

import itertools

import pytest
import torch

from whetstone.model.attention import LayerOptions, PackedAttention, bucket_by_length, packed_segments
from whetstone.types import Segment

CPU = torch.device("cpu")
# Prompts of 6 and 9 tokens, each with completions of very different lengths, and sequences for themselves.
SHARED = [
    Segment(0, 6), Segment(6, 1, ((0, 6),)), Segment(7, 40, ((0, 6),)), Segment(47, 3, ((0, 6),)),
    Segment(50, 9), Segment(59, 17, ((50, 9),)), Segment(76, 2, ((50, 9),)), Segment(78, 31), Segment(109, 4),
]  # fmt: skip
# A prompt with a sequence; others share parts of both, and parts of one another.
BRANCHES = [
    Segment(0, 6), Segment(6, 9, ((0, 6),)), Segment(15, 3, ((0, 6), (6, 4))), Segment(18, 7),
    Segment(25, 11, ((0, 6), (6, 4), (15, 2))), Segment(36, 2, ((18, 3),)), Segment(38, 1, ((0, 2),)),
]  # fmt: skip


def plain(query, key, value, segments: list[Segment], window: int | None, softcap: float | None):
    """Token by token."""
    out = torch.zeros_like(query)
    groups = query.shape[1] // key.shape[1]
    for segment in segments:
        prefix = [token for start, length in segment.prefix for token in range(start, start + length)]
        own = range(segment.start, segment.start + segment.length)
        for place, token in enumerate(own):
            seen = [*prefix, *own[: place + 1]][-(window or 10**9) :]
            keys, values = (t[:, seen].repeat_interleave(groups, 0) for t in (key[0], value[0]))
            scores = (keys @ query[0, :, token, :, None]).squeeze(-1) * 0.3
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            out[0, :, token] = (scores.softmax(-1)[:, None] @ values).squeeze(1)
    return out.transpose(1, 2)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (None, 2.0), (5, 2.0)])
@pytest.mark.parametrize(
    "segments", [SHARED, BRANCHES, packed_segments([3, 40, 1, 2, 17, 8]), packed_segments([4, 6, 5])]
)
def test_every_segment_is_as_if_it_were_alone(segments, window, softcap):
    torch.manual_seed(0)
    total = max(segment.start + segment.length for segment in segments)
    sizes = [(1, heads, total, 8) for heads in (4, 2, 2)]
    tensors = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]
    query, key, value = tensors
    options = LayerOptions(layer=0, scale=0.3, sliding_window=window, softcap=softcap)
    out = PackedAttention(segments, CPU)(query, key, value, options)
    expected = plain(query, key, value, segments, window, softcap)
    near = 1e-6 if softcap else 1e-12  # softcapped weights are float32
    assert torch.allclose(out, expected, rtol=0, atol=near)
    weight = torch.randn_like(out)
    found = torch.autograd.grad((out * weight).sum(), tensors)
    wanted = torch.autograd.grad((expected * weight).sum(), tensors)
    assert all(torch.allclose(a, b, rtol=0, atol=10 * near) for a, b in zip(found, wanted, strict=True))


def test_padding_at_most_doubles_the_queries():
    lengths = [4, 4, 5, 36, 9, 1, 18, 17, 2, 35]
    parts = bucket_by_length(packed_segments(lengths))
    assert sorted(segment.length for segment in itertools.chain(*parts)) == sorted(lengths)
    assert [sorted(segment.length for segment in part) for part in parts] == [
        [18, 35, 36],
        [9, 17],
        [4, 4, 5],
        [1, 2],
    ]
    for part in parts:  # in the order in which they lie, so that a part alone needs no sorting
        assert [segment.start for segment in part] == sorted(segment.start for segment in part)
    assert bucket_by_length([]) == []
