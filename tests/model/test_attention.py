"""Attention inside segments laid end to end, beside a plain one in float64, whatever their lengths."""

import itertools

import pytest
import torch

from tests.support.packed import BRANCHES, SHARED, attend
from whetstone.model.attention import LayerOptions, PackedAttention, bucket_by_length, packed_segments

CPU = torch.device("cpu")


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
    q, k, v = (tensor[0].transpose(0, 1) for tensor in tensors)
    expected = attend(q, k, v, segments, 0.3, window, softcap)[None]
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
