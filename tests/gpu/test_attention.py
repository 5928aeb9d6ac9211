"""The attention that is written in CUDA, on a real GPU, beside float64."""

import pytest
import torch

from tests.hopper.attention_on_cpu import EPS, LAYER, OFFSET, SCALE, check
from whetstone.engines.native.kernels.hopper import attention as hopper_attention
from whetstone.engines.native.slot_state import AttentionLayer, CacheShape, PagedState
from whetstone.model.attention import LayerOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < hopper_attention.MIN_CAPABILITY,
        reason="needs a Hopper GPU",
    ),
]


@pytest.mark.parametrize(
    ("width", "kv_heads", "group", "dtype", "norm"),
    [
        (128, 2, 6, torch.bfloat16, False),
        (64, 2, 7, torch.bfloat16, False),
        (128, 2, 8, torch.bfloat16, True),
        (64, 3, 3, torch.float16, False),
        (128, 8, 1, torch.float16, True),
    ],
)
def test_agrees_with_float64(width, kv_heads, group, dtype, norm, monkeypatch):
    monkeypatch.setattr(hopper_attention, "MIN_PROGRAMS", 1)
    monkeypatch.setattr(hopper_attention, "LONG_PAGES", 40)

    def launch(query, key, value, rotary, norms, state, rows):
        there = PagedState(on_gpu(state.shape), state.num_slots, state.table.shape[1], state.max_tokens)
        there.allocate_pages(state.num_pages)
        assert there.pages is not None
        there.pages.copy_(state.pages)
        there.slots.copy_(state.slots)
        there.table.copy_(state.table)
        layer = AttentionLayer(
            options=LayerOptions(layer=LAYER, scale=SCALE, sliding_window=None, softcap=None),
            heads=kv_heads * group,
            kv_heads=kv_heads,
            head_dim=width,
            rotary=(rotary[0].cuda(), rotary[1].cuda()),
            head_norms=(norms[0].cuda(), norms[1].cuda()) if norm else None,
            norm_offset=OFFSET,
            norm_eps=EPS,
        )
        out = hopper_attention.try_attention(
            query.cuda(), key.cuda(), value.cuda(), there, rows.cuda(), layer
        )
        assert out is not None
        return out.cpu(), there.pages.cpu()

    check(launch, width, kv_heads, group, dtype, norm)


def on_gpu(shape: CacheShape) -> CacheShape:
    return CacheShape(
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
        device=torch.device("cuda"),
    )
