"""Decode attention over pages: rotary embedding, cache write and attention of one new token per row.

A slot's pages are the prompt's, shared with its group, and then its own. The new key and value are written to
the slot's page and used from registers. Few rows of long sequences are split (flash decoding), and a second
kernel merges the splits. The cache's address is read from device memory, so a CUDA graph outlives the cache
that it was captured with. Many rows in half precision run in hopper/attention.cu.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whetstone.engines.native import slot_state
from whetstone.engines.native.kernels import hopper
from whetstone.engines.native.slot_state import PAGE, AttentionLayer, PagedState

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
# Two programs per multiprocessor of a large GPU: with fewer, sequences are split.
TARGET_PROGRAMS = 264
TILE, NUM_WARPS, NUM_STAGES = 64, 4, 2  # tuned on an H200


@triton.jit
def _normed(low, high, weight_ptr, d, mask, eps, HEAD_DIM: tl.constexpr, OFFSET: tl.constexpr):
    """RMS norm over a head given as two halves ([rows, HALF] or [HALF])."""
    axis: tl.constexpr = len(low.shape) - 1
    mean = (tl.sum(low * low, axis) + tl.sum(high * high, axis)) / HEAD_DIM
    factor = tl.rsqrt(mean + eps)
    if axis == 1:
        factor = factor[:, None]
    w_low = tl.load(weight_ptr + d, mask=mask, other=0.0).to(tl.float32) + OFFSET
    w_high = tl.load(weight_ptr + d + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32) + OFFSET
    if axis == 1:
        w_low, w_high = w_low[None, :], w_high[None, :]
    return low * factor * w_low, high * factor * w_high


# Not specialized: these differ between layers and runs, and the kernel is compiled only once.
@triton.jit(do_not_specialize=["layer", "num_slots", "table_width", "window"])
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, lse_ptr,
    cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr,
    bases_ptr, slots_ptr, table_ptr, rows_ptr,
    layer, q_stride, k_stride, v_stride, num_slots, table_width, window, scale, softcap, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF_PADDED: tl.constexpr,
    GROUP_PADDED: tl.constexpr, SPLITS: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr,
    CACHE_TYPE: tl.constexpr,
    ROTARY: tl.constexpr, NORM: tl.constexpr, NORM_OFFSET: tl.constexpr, SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr, F_ACTIVE: tl.constexpr, F_PROMPT_LEN: tl.constexpr, F_NUM_CACHED: tl.constexpr,
):  # fmt: skip
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(rows_ptr + row)
    if slot < 0:
        return
    if tl.load(slots_ptr + F_ACTIVE * num_slots + slot) == 0:
        return
    prompt_len = tl.load(slots_ptr + F_PROMPT_LEN * num_slots + slot)
    num_cached = tl.load(slots_ptr + F_NUM_CACHED * num_slots + slot)
    position = prompt_len + num_cached
    HALF: tl.constexpr = HEAD_DIM // 2
    GROUP: tl.constexpr = HEADS // KV_HEADS
    g, d = tl.arange(0, GROUP_PADDED), tl.arange(0, HALF_PADDED)
    mask = d < HALF
    query_mask = (g < GROUP)[:, None] & mask[None, :]
    q_address = q_ptr + row * q_stride + (kv_head * GROUP + g)[:, None] * HEAD_DIM + d[None, :]
    k_address = k_ptr + row * k_stride + kv_head * HEAD_DIM + d
    v_address = v_ptr + row * v_stride + kv_head * HEAD_DIM + d
    q_low = tl.load(q_address, mask=query_mask, other=0.0).to(tl.float32)
    q_high = tl.load(q_address + HALF, mask=query_mask, other=0.0).to(tl.float32)
    k_low = tl.load(k_address, mask=mask, other=0.0).to(tl.float32)
    k_high = tl.load(k_address + HALF, mask=mask, other=0.0).to(tl.float32)
    v_low = tl.load(v_address, mask=mask, other=0.0)
    v_high = tl.load(v_address + HALF, mask=mask, other=0.0)
    if NORM:
        q_low, q_high = _normed(q_low, q_high, q_norm_ptr, d, mask, eps, HEAD_DIM, NORM_OFFSET)
        k_low, k_high = _normed(k_low, k_high, k_norm_ptr, d, mask, eps, HEAD_DIM, NORM_OFFSET)
    if ROTARY:
        cos = tl.load(cos_ptr + position * HALF + d, mask=mask, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + position * HALF + d, mask=mask, other=0.0).to(tl.float32)
        q_rotated = q_low * cos[None, :] - q_high * sin[None, :]
        q_high = q_high * cos[None, :] + q_low * sin[None, :]
        q_low = q_rotated
        k_rotated = k_low * cos - k_high * sin
        k_high = k_high * cos + k_low * sin
        k_low = k_rotated
    q_low, q_high = q_low.to(CACHE_TYPE), q_high.to(CACHE_TYPE)
    k_low, k_high = k_low.to(CACHE_TYPE), k_high.to(CACHE_TYPE)

    # The compiler cannot see how addresses read from memory are aligned, and would not vectorize.
    pages_of_layer = layer * tl.multiple_of(tl.load(bases_ptr + 2), 16) + kv_head * PAGE_SIZE * HEAD_DIM
    keys = tl.multiple_of(tl.load(bases_ptr).to(tl.pointer_type(CACHE_TYPE)), 16) + pages_of_layer
    values = tl.multiple_of(tl.load(bases_ptr + 1).to(tl.pointer_type(CACHE_TYPE)), 16) + pages_of_layer
    prompt_pages = tl.cdiv(prompt_len, PAGE_SIZE)
    prompt_tiles = tl.cdiv(prompt_len, TILE)
    PAGE_STRIDE: tl.constexpr = KV_HEADS * PAGE_SIZE * HEAD_DIM
    table = table_ptr + slot * table_width

    highest = tl.full((GROUP_PADDED,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PADDED,), tl.float32)
    out_low = tl.zeros((GROUP_PADDED, HALF_PADDED), tl.float32)
    out_high = tl.zeros((GROUP_PADDED, HALF_PADDED), tl.float32)
    if split == 0:  # the new token itself
        page = tl.load(table + prompt_pages + num_cached // PAGE_SIZE).to(tl.int64)
        cell = page * PAGE_STRIDE + (num_cached % PAGE_SIZE) * HEAD_DIM + d
        tl.store(keys + cell, k_low, mask=mask)
        tl.store(keys + cell + HALF, k_high, mask=mask)
        tl.store(values + cell, v_low, mask=mask)
        tl.store(values + cell + HALF, v_high, mask=mask)
        score = tl.sum(q_low.to(tl.float32) * k_low.to(tl.float32)[None, :], 1)
        score += tl.sum(q_high.to(tl.float32) * k_high.to(tl.float32)[None, :], 1)
        score *= scale
        if SOFTCAP:
            tanh = 2 / (1 + tl.exp(-2 * score / softcap)) - 1
            score = softcap * tanh
        highest = score * LOG2E
        total += 1.0
        out_low += v_low.to(tl.float32)[None, :]
        out_high += v_high.to(tl.float32)[None, :]

    first = 0
    tiles = prompt_tiles + tl.cdiv(num_cached, TILE)
    if WINDOW:  # tiles that lie wholly before the window are not read
        lowest = tl.maximum(position - window + 1, 0)
        in_own = prompt_tiles + tl.maximum(lowest - prompt_len, 0) // TILE
        first = tl.where(lowest < prompt_len, lowest // TILE, in_own)
    tiles_per_split = tl.cdiv(tl.maximum(tiles - first, 0), SPLITS)
    begin = first + split * tiles_per_split
    end = tl.minimum(begin + tiles_per_split, tiles)
    # A group's prompt is in the L2 cache, a row's own tokens are in DRAM. Half of the programs start at
    # either end, so that both are read at the same time. By heads, not rows: a sample's rounding must not
    # depend on its slot.
    backwards = kv_head % 2 == 1
    j = tl.arange(0, TILE)
    for number in range(begin, end):
        tile = tl.where(backwards, begin + end - 1 - number, number)
        is_prompt = tile < prompt_tiles
        inner = tl.where(is_prompt, tile, tile - prompt_tiles) * TILE  # first token, of the prompt or its own
        page = tl.load(table + inner // PAGE_SIZE + tl.where(is_prompt, 0, prompt_pages)).to(tl.int64)
        start = inner + tl.where(is_prompt, 0, prompt_len)
        filled = tl.where(is_prompt, prompt_len, position) - start
        visible = j < filled
        if WINDOW:
            visible = visible & (position - start - j < window)
        tile_mask = visible[:, None] & mask[None, :]
        offset = page * PAGE_STRIDE + (inner % PAGE_SIZE + j)[:, None] * HEAD_DIM + d[None, :]
        key_low = tl.load(keys + offset, mask=tile_mask, other=0.0)
        key_high = tl.load(keys + offset + HALF, mask=tile_mask, other=0.0)
        scores = tl.dot(q_low, tl.trans(key_low), input_precision="ieee")
        scores = tl.dot(q_high, tl.trans(key_high), scores, input_precision="ieee") * scale
        if SOFTCAP:
            tanh = 2 / (1 + tl.exp(-2 * scores / softcap)) - 1
            scores = softcap * tanh
        scores = tl.where(visible[None, :], scores * LOG2E, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        finite = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # nothing visible so far
        weights = tl.exp2(scores - finite[:, None])
        rescale = tl.exp2(highest - finite)
        total = total * rescale + tl.sum(weights, 1)
        weights = weights.to(CACHE_TYPE)
        value_low = tl.load(values + offset, mask=tile_mask, other=0.0)
        value_high = tl.load(values + offset + HALF, mask=tile_mask, other=0.0)
        out_low = tl.dot(weights, value_low, out_low * rescale[:, None], input_precision="ieee")
        out_high = tl.dot(weights, value_high, out_high * rescale[:, None], input_precision="ieee")
        highest = new_highest

    heads = kv_head * GROUP + g
    if SPLITS == 1:
        address = out_ptr + (row * HEADS + heads)[:, None] * HEAD_DIM + d[None, :]
        tl.store(address, (out_low / total[:, None]).to(out_ptr.dtype.element_ty), mask=query_mask)
        tl.store(address + HALF, (out_high / total[:, None]).to(out_ptr.dtype.element_ty), mask=query_mask)
    else:
        piece = (row * HEADS + heads) * SPLITS + split
        safe = tl.where(total == 0, 1.0, total)
        address = partial_ptr + piece[:, None] * HEAD_DIM + d[None, :]
        tl.store(address, out_low / safe[:, None], mask=query_mask)
        tl.store(address + HALF, out_high / safe[:, None], mask=query_mask)
        tl.store(lse_ptr + piece, highest + tl.log2(total), mask=g < GROUP)


@triton.jit
def _merge_kernel(
    partial_ptr, lse_ptr, out_ptr, rows_ptr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    if tl.load(rows_ptr + row) < 0:
        return
    s, d = tl.arange(0, SPLITS), tl.arange(0, HEAD_DIM_PADDED)
    first = (row * HEADS + head) * SPLITS
    lse = tl.load(lse_ptr + first + s)
    weight = tl.exp2(lse - tl.max(lse, 0))
    weight = weight / tl.sum(weight, 0)
    address = partial_ptr + (first + s)[:, None] * HEAD_DIM + d[None, :]
    partials = tl.load(address, mask=(d < HEAD_DIM)[None, :], other=0.0)
    out = tl.sum(partials * weight[:, None], 0)
    tl.store(
        out_ptr + (row * HEADS + head) * HEAD_DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM
    )


def splits_for(programs: int, longest_pages: int) -> int:
    """A power of two: enough programs to fill the GPU, at most one per page."""
    wanted = min(triton.cdiv(TARGET_PROGRAMS, programs), longest_pages, 64)
    return 1 << max(0, wanted.bit_length() - 1)


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, state: PagedState, rows: Tensor, layer: AttentionLayer
) -> Tensor:
    """[n, heads * D] queries and [n, kv_heads * D] new keys and values -> [n, heads * D]. The
    kernel just before must not write `state.slots` or `rows`: this one may start while that one runs (PDL).
    """
    if hopper is not None:
        out = hopper.try_attention(query, key, value, state, rows, layer)
        if out is not None:
            return out
    num_rows, heads, kv_heads, head_dim = len(rows), layer.heads, layer.kv_heads, layer.head_dim
    options = layer.options
    splits = splits_for(num_rows * kv_heads, state.table.shape[1])
    out = torch.empty(num_rows, heads * head_dim, dtype=query.dtype, device=query.device)
    partial = lse = out
    if splits > 1:
        partial = torch.empty(num_rows, heads, splits, head_dim, dtype=torch.float32, device=query.device)
        lse = torch.empty(num_rows, heads, splits, dtype=torch.float32, device=query.device)
    rotary, norms = layer.rotary, layer.head_norms
    _attention_kernel[num_rows, kv_heads, splits](
        query, key, value, out, partial, lse,
        *(rotary if rotary is not None else (out, out)),
        *(norms if norms is not None else (out, out)),
        state.bases, state.slots, state.table, rows,
        options.layer, query.stride(0), key.stride(0), value.stride(0), state.num_slots, state.table.shape[1],
        options.sliding_window or 0, options.scale, options.softcap or 0.0, layer.norm_eps,
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim,
        HALF_PADDED=max(16, triton.next_power_of_2(head_dim // 2)),
        GROUP_PADDED=max(16, triton.next_power_of_2(heads // kv_heads)), SPLITS=splits, PAGE_SIZE=PAGE,
        TILE=TILE, CACHE_TYPE=TYPES[state.dtype], ROTARY=rotary is not None, NORM=norms is not None,
        NORM_OFFSET=layer.norm_offset, SOFTCAP=options.softcap is not None,
        WINDOW=options.sliding_window is not None, F_ACTIVE=slot_state.ACTIVE,
        F_PROMPT_LEN=slot_state.PROMPT_LEN, F_NUM_CACHED=slot_state.NUM_CACHED,
        num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[num_rows, heads](
            partial, lse, out, rows, HEADS=heads, HEAD_DIM=head_dim,
            HEAD_DIM_PADDED=triton.next_power_of_2(head_dim), SPLITS=splits,
        )  # fmt: skip
    return out


TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
