"""Prefill: head norms, rotary embedding, and the keys and values of many new tokens into their pages."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whetstone.engines.native.kernels.attention import TYPES
from whetstone.engines.native.slot_state import PAGE, AttentionLayer, PagedState


@triton.jit(do_not_specialize=["layer"])
def _rotate_kernel(
    qkv_ptr, q_ptr, k_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, bases_ptr, positions_ptr, cells_ptr,
    layer, qkv_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr, CACHE_TYPE: tl.constexpr, NORM: tl.constexpr, NORM_OFFSET: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    HALF: tl.constexpr = HEAD_DIM // 2
    d = tl.arange(0, HALF_PADDED)
    mask = d < HALF
    source = qkv_ptr + token.to(tl.int64) * qkv_stride + head * HEAD_DIM + d
    low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if NORM:
            norm_ptr = q_norm_ptr if head < HEADS else k_norm_ptr
            factor = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / HEAD_DIM + eps)
            low *= factor * (tl.load(norm_ptr + d, mask=mask, other=0.0).to(tl.float32) + NORM_OFFSET)
            high *= factor * (tl.load(norm_ptr + HALF + d, mask=mask, other=0.0).to(tl.float32) + NORM_OFFSET)
        angle = tl.load(positions_ptr + token) * HALF + d
        cos = tl.load(cos_ptr + angle, mask=mask, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle, mask=mask, other=0.0).to(tl.float32)
        rotated = low * cos - high * sin
        high = high * cos + low * sin
        low = rotated
    low, high = low.to(CACHE_TYPE), high.to(CACHE_TYPE)
    if head < HEADS:
        out = q_ptr + (token.to(tl.int64) * HEADS + head) * HEAD_DIM + d
        tl.store(out, low, mask=mask)
        tl.store(out + HALF, high, mask=mask)
    else:
        is_key = head < HEADS + KV_HEADS
        kv_head = tl.where(is_key, head - HEADS, head - HEADS - KV_HEADS)
        if is_key:
            out = k_ptr + (token.to(tl.int64) * KV_HEADS + kv_head) * HEAD_DIM + d
            tl.store(out, low, mask=mask)
            tl.store(out + HALF, high, mask=mask)
        cell = tl.load(cells_ptr + token)
        if cell >= 0:
            base = tl.load(bases_ptr + tl.where(is_key, 0, 1)).to(tl.pointer_type(CACHE_TYPE))
            page = (cell // PAGE_SIZE).to(tl.int64) * KV_HEADS + kv_head
            target = (
                base + layer * tl.load(bases_ptr + 2) + (page * PAGE_SIZE + cell % PAGE_SIZE) * HEAD_DIM + d
            )
            tl.store(target, low, mask=mask)
            tl.store(target + HALF, high, mask=mask)


def rotate_and_store(
    qkv: Tensor, state: PagedState, positions: Tensor, cells: Tensor, layer: AttentionLayer
) -> tuple[Tensor, Tensor, Tensor]:
    """[T, (heads + 2 kv_heads) * D] -> queries [T, heads, D], keys and values [T, kv_heads, D].

    `cells` [T] are positions in the cache (page * PAGE + offset), -1 for cached tokens.
    """
    num_tokens, heads, kv_heads, head_dim = len(qkv), layer.heads, layer.kv_heads, layer.head_dim
    query = torch.empty(num_tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    key = torch.empty(num_tokens, kv_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    assert layer.rotary is not None
    norms = layer.head_norms if layer.head_norms is not None else (qkv, qkv)
    _rotate_kernel[num_tokens, heads + 2 * kv_heads](
        qkv, query, key, *layer.rotary, *norms, state.bases, positions, cells,
        layer.options.layer, qkv.stride(0), layer.norm_eps,
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim,
        HALF_PADDED=max(16, triton.next_power_of_2(head_dim // 2)),
        PAGE_SIZE=PAGE, CACHE_TYPE=TYPES[state.dtype], NORM=layer.head_norms is not None,
        NORM_OFFSET=layer.norm_offset, num_warps=1,
    )  # fmt: skip
    value = qkv[:, (heads + kv_heads) * head_dim :].view(num_tokens, kv_heads, head_dim)
    return query, key, value
