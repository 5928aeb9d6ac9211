"""Many new tokens at once: norms of heads, rotary embedding, and keys and values into their pages.

The prefill's counterpart of what the decode kernel does for one token (attention.py). Returns queries and
keys as the attention wants them; the attention itself is torch's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whetstone.engines.native.kernels.attention import TYPES
from whetstone.engines.native.slot_state import PAGE, AttentionLayer, PagedState


@triton.jit(do_not_specialize=["layer"])
def _rotate_kernel(
    qkv_ptr, q_ptr, k_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, bases_ptr, positions_ptr, places_ptr,
    layer, qkv_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, HALF_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr, CACHE_TYPE: tl.constexpr, NORM: tl.constexpr, NORM_OFFSET: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    HALF: tl.constexpr = WIDTH // 2
    d = tl.arange(0, HALF_PADDED)
    inside = d < HALF
    at = qkv_ptr + token.to(tl.int64) * qkv_stride + head * WIDTH + d
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if NORM:
            norm_ptr = q_norm_ptr if head < HEADS else k_norm_ptr
            factor = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / WIDTH + eps)
            low *= factor * (tl.load(norm_ptr + d, mask=inside, other=0.0).to(tl.float32) + NORM_OFFSET)
            high *= factor * (
                tl.load(norm_ptr + HALF + d, mask=inside, other=0.0).to(tl.float32) + NORM_OFFSET
            )
        turn = tl.load(positions_ptr + token) * HALF + d
        cos = tl.load(cos_ptr + turn, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + turn, mask=inside, other=0.0).to(tl.float32)
        turned = low * cos - high * sin
        high = high * cos + low * sin
        low = turned
    low, high = low.to(CACHE_TYPE), high.to(CACHE_TYPE)
    if head < HEADS:
        out = q_ptr + (token.to(tl.int64) * HEADS + head) * WIDTH + d
        tl.store(out, low, mask=inside)
        tl.store(out + HALF, high, mask=inside)
    else:
        is_key = head < HEADS + KV_HEADS
        kv_head = tl.where(is_key, head - HEADS, head - HEADS - KV_HEADS)
        if is_key:
            out = k_ptr + (token.to(tl.int64) * KV_HEADS + kv_head) * WIDTH + d
            tl.store(out, low, mask=inside)
            tl.store(out + HALF, high, mask=inside)
        place = tl.load(places_ptr + token)
        if place >= 0:
            base = tl.load(bases_ptr + tl.where(is_key, 0, 1)).to(tl.pointer_type(CACHE_TYPE))
            page = (place // PAGE_SIZE).to(tl.int64) * KV_HEADS + kv_head
            cell = base + layer * tl.load(bases_ptr + 2) + (page * PAGE_SIZE + place % PAGE_SIZE) * WIDTH + d
            tl.store(cell, low, mask=inside)
            tl.store(cell + HALF, high, mask=inside)


def rotate_and_store(
    qkv: Tensor, state: PagedState, positions: Tensor, places: Tensor, layer: AttentionLayer
) -> tuple[Tensor, Tensor, Tensor]:
    """[T, (heads + 2 kv_heads) * D] -> queries [T, heads, D], keys and values [T, kv_heads, D].

    `places` [T] are cells of the cache (page * PAGE + offset), -1 for tokens that are there already.
    """
    num_tokens, heads, kv_heads, width = len(qkv), layer.heads, layer.kv_heads, layer.width
    query = torch.empty(num_tokens, heads, width, dtype=qkv.dtype, device=qkv.device)
    key = torch.empty(num_tokens, kv_heads, width, dtype=qkv.dtype, device=qkv.device)
    assert layer.rotary is not None
    norms = layer.head_norms if layer.head_norms is not None else (qkv, qkv)
    _rotate_kernel[num_tokens, heads + 2 * kv_heads](
        qkv, query, key, *layer.rotary, *norms, state.bases, positions, places,
        layer.options.layer, qkv.stride(0), layer.norm_eps,
        HEADS=heads, KV_HEADS=kv_heads, WIDTH=width, HALF_PADDED=max(16, triton.next_power_of_2(width // 2)),
        PAGE_SIZE=PAGE, CACHE_TYPE=TYPES[state.dtype], NORM=layer.head_norms is not None,
        NORM_OFFSET=layer.norm_offset, num_warps=1,
    )  # fmt: skip
    value = qkv[:, (heads + kv_heads) * width :].view(num_tokens, kv_heads, width)
    return query, key, value
