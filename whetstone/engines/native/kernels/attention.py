"""One new token per row against the pages of its slot: rotary embedding, cache write and attention at once.

A slot's pages are the prompt's, shared with the other samples of its group, and then its own. The new key and
value are written to the slot's page and used from registers. Few rows of long sequences are cut into splits,
whose results a second kernel merges. Where the cache lies is read from device memory, so that a captured
graph outlives the cache it was captured with. Many rows in half precision are for attention_cuda.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whetstone.engines.native.kernels.hopper.attention import attend
from whetstone.engines.native.slot_state import ACTIVE, OWN, PAGE, PREFIX, AttentionLayer, PagedState

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
# Two for every multiprocessor of a large chip: with fewer, sequences are split.
WANTED_PROGRAMS = 264
TILE, NUM_WARPS, NUM_STAGES = 64, 4, 2  # found by measurement on an H200


@triton.jit
def _normed(low, high, weight_ptr, d, inside, eps, WIDTH: tl.constexpr, OFFSET: tl.constexpr):
    """RMS norm over a head given as two halves ([rows, HALF] or [HALF])."""
    axis: tl.constexpr = len(low.shape) - 1
    mean = (tl.sum(low * low, axis) + tl.sum(high * high, axis)) / WIDTH
    factor = tl.rsqrt(mean + eps)
    if axis == 1:
        factor = factor[:, None]
    w_low = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32) + OFFSET
    w_high = tl.load(weight_ptr + d + WIDTH // 2, mask=inside, other=0.0).to(tl.float32) + OFFSET
    if axis == 1:
        w_low, w_high = w_low[None, :], w_high[None, :]
    return low * factor * w_low, high * factor * w_high


# Not specialised: these differ from layer to layer or from run to run, and a kernel is compiled only once.
@triton.jit(do_not_specialize=["layer", "num_slots", "table_width", "window"])
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, lse_ptr,
    cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr,
    bases_ptr, state_ptr, table_ptr, rows_ptr,
    layer, q_stride, k_stride, v_stride, num_slots, table_width, window, scale, softcap, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, HALF_PADDED: tl.constexpr,
    GROUP_PADDED: tl.constexpr, SPLITS: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr,
    CACHE_TYPE: tl.constexpr,
    ROTARY: tl.constexpr, NORM: tl.constexpr, NORM_OFFSET: tl.constexpr, SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr, F_ACTIVE: tl.constexpr, F_PREFIX: tl.constexpr, F_OWN: tl.constexpr,
):  # fmt: skip
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(rows_ptr + row)
    if slot < 0:
        return
    if tl.load(state_ptr + F_ACTIVE * num_slots + slot) == 0:
        return
    prefix = tl.load(state_ptr + F_PREFIX * num_slots + slot)
    own = tl.load(state_ptr + F_OWN * num_slots + slot)
    position = prefix + own
    HALF: tl.constexpr = WIDTH // 2
    GROUP: tl.constexpr = HEADS // KV_HEADS
    g, d = tl.arange(0, GROUP_PADDED), tl.arange(0, HALF_PADDED)
    inside = d < HALF
    query_inside = (g < GROUP)[:, None] & inside[None, :]
    q_at = q_ptr + row * q_stride + (kv_head * GROUP + g)[:, None] * WIDTH + d[None, :]
    k_at = k_ptr + row * k_stride + kv_head * WIDTH + d
    v_at = v_ptr + row * v_stride + kv_head * WIDTH + d
    q_low = tl.load(q_at, mask=query_inside, other=0.0).to(tl.float32)
    q_high = tl.load(q_at + HALF, mask=query_inside, other=0.0).to(tl.float32)
    k_low = tl.load(k_at, mask=inside, other=0.0).to(tl.float32)
    k_high = tl.load(k_at + HALF, mask=inside, other=0.0).to(tl.float32)
    v_low = tl.load(v_at, mask=inside, other=0.0)
    v_high = tl.load(v_at + HALF, mask=inside, other=0.0)
    if NORM:
        q_low, q_high = _normed(q_low, q_high, q_norm_ptr, d, inside, eps, WIDTH, NORM_OFFSET)
        k_low, k_high = _normed(k_low, k_high, k_norm_ptr, d, inside, eps, WIDTH, NORM_OFFSET)
    if ROTARY:
        cos = tl.load(cos_ptr + position * HALF + d, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + position * HALF + d, mask=inside, other=0.0).to(tl.float32)
        q_turned = q_low * cos[None, :] - q_high * sin[None, :]
        q_high = q_high * cos[None, :] + q_low * sin[None, :]
        q_low = q_turned
        k_turned = k_low * cos - k_high * sin
        k_high = k_high * cos + k_low * sin
        k_low = k_turned
    q_low, q_high = q_low.to(CACHE_TYPE), q_high.to(CACHE_TYPE)
    k_low, k_high = k_low.to(CACHE_TYPE), k_high.to(CACHE_TYPE)

    # The compiler can't see how addresses read from memory are aligned, and would load number by number.
    pages_of_layer = layer * tl.multiple_of(tl.load(bases_ptr + 2), 16) + kv_head * PAGE_SIZE * WIDTH
    keys = tl.multiple_of(tl.load(bases_ptr).to(tl.pointer_type(CACHE_TYPE)), 16) + pages_of_layer
    values = tl.multiple_of(tl.load(bases_ptr + 1).to(tl.pointer_type(CACHE_TYPE)), 16) + pages_of_layer
    prompt_pages = tl.cdiv(prefix, PAGE_SIZE)
    prompt_tiles = tl.cdiv(prefix, TILE)
    PAGE_STRIDE: tl.constexpr = KV_HEADS * PAGE_SIZE * WIDTH
    table = table_ptr + slot * table_width

    highest = tl.full((GROUP_PADDED,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PADDED,), tl.float32)
    out_low = tl.zeros((GROUP_PADDED, HALF_PADDED), tl.float32)
    out_high = tl.zeros((GROUP_PADDED, HALF_PADDED), tl.float32)
    if split == 0:  # the new token itself
        page = tl.load(table + prompt_pages + own // PAGE_SIZE).to(tl.int64)
        place = page * PAGE_STRIDE + (own % PAGE_SIZE) * WIDTH + d
        tl.store(keys + place, k_low, mask=inside)
        tl.store(keys + place + HALF, k_high, mask=inside)
        tl.store(values + place, v_low, mask=inside)
        tl.store(values + place + HALF, v_high, mask=inside)
        score = tl.sum(q_low.to(tl.float32) * k_low.to(tl.float32)[None, :], 1)
        score += tl.sum(q_high.to(tl.float32) * k_high.to(tl.float32)[None, :], 1)
        score *= scale
        if SOFTCAP:
            bent = 2 / (1 + tl.exp(-2 * score / softcap)) - 1  # tanh
            score = softcap * bent
        highest = score * LOG2E
        total += 1.0
        out_low += v_low.to(tl.float32)[None, :]
        out_high += v_high.to(tl.float32)[None, :]

    first = 0
    tiles = prompt_tiles + tl.cdiv(own, TILE)
    if WINDOW:  # tiles that lie wholly before the window are not read
        lowest = tl.maximum(position - window + 1, 0)
        in_own = prompt_tiles + tl.maximum(lowest - prefix, 0) // TILE
        first = tl.where(lowest < prefix, lowest // TILE, in_own)
    share = tl.cdiv(tl.maximum(tiles - first, 0), SPLITS)
    begin = first + split * share
    end = tl.minimum(begin + share, tiles)
    # A group's prompt is in the chip's cache, a row's own tokens are in its memory. Half of the programs
    # begin at the one end and half at the other, so that cache and memory are read at the same time. Not by
    # rows: a sample's rounding must not depend on where it sits.
    backwards = kv_head % 2 == 1
    j = tl.arange(0, TILE)
    for number in range(begin, end):
        tile = tl.where(backwards, begin + end - 1 - number, number)
        is_prompt = tile < prompt_tiles
        inner = tl.where(is_prompt, tile, tile - prompt_tiles) * TILE  # first token, of the prompt or its own
        page = tl.load(table + inner // PAGE_SIZE + tl.where(is_prompt, 0, prompt_pages)).to(tl.int64)
        start = inner + tl.where(is_prompt, 0, prefix)
        filled = tl.where(is_prompt, prefix, position) - start
        seen = j < filled
        if WINDOW:
            seen = seen & (position - start - j < window)
        tile_inside = seen[:, None] & inside[None, :]
        at = page * PAGE_STRIDE + (inner % PAGE_SIZE + j)[:, None] * WIDTH + d[None, :]
        key_low = tl.load(keys + at, mask=tile_inside, other=0.0)
        key_high = tl.load(keys + at + HALF, mask=tile_inside, other=0.0)
        scores = tl.dot(q_low, tl.trans(key_low), input_precision="ieee")
        scores = tl.dot(q_high, tl.trans(key_high), scores, input_precision="ieee") * scale
        if SOFTCAP:
            bent = 2 / (1 + tl.exp(-2 * scores / softcap)) - 1
            scores = softcap * bent
        scores = tl.where(seen[None, :], scores * LOG2E, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen so far
        weights = tl.exp2(scores - finite[:, None])
        fade = tl.exp2(highest - finite)
        total = total * fade + tl.sum(weights, 1)
        weights = weights.to(CACHE_TYPE)
        value_low = tl.load(values + at, mask=tile_inside, other=0.0)
        value_high = tl.load(values + at + HALF, mask=tile_inside, other=0.0)
        out_low = tl.dot(weights, value_low, out_low * fade[:, None], input_precision="ieee")
        out_high = tl.dot(weights, value_high, out_high * fade[:, None], input_precision="ieee")
        highest = higher

    heads = kv_head * GROUP + g
    if SPLITS == 1:
        at = out_ptr + (row * HEADS + heads)[:, None] * WIDTH + d[None, :]
        tl.store(at, (out_low / total[:, None]).to(out_ptr.dtype.element_ty), mask=query_inside)
        tl.store(at + HALF, (out_high / total[:, None]).to(out_ptr.dtype.element_ty), mask=query_inside)
    else:
        piece = (row * HEADS + heads) * SPLITS + split
        safe = tl.where(total == 0, 1.0, total)
        at = partial_ptr + piece[:, None] * WIDTH + d[None, :]
        tl.store(at, out_low / safe[:, None], mask=query_inside)
        tl.store(at + HALF, out_high / safe[:, None], mask=query_inside)
        tl.store(lse_ptr + piece, highest + tl.log2(total), mask=g < GROUP)


@triton.jit
def _merge_kernel(
    partial_ptr, lse_ptr, out_ptr, rows_ptr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    if tl.load(rows_ptr + row) < 0:
        return
    s, d = tl.arange(0, SPLITS), tl.arange(0, WIDTH_PADDED)
    first = (row * HEADS + head) * SPLITS
    lse = tl.load(lse_ptr + first + s)
    weight = tl.exp2(lse - tl.max(lse, 0))
    weight = weight / tl.sum(weight, 0)
    at = partial_ptr + (first + s)[:, None] * WIDTH + d[None, :]
    parts = tl.load(at, mask=(d < WIDTH)[None, :], other=0.0)
    out = tl.sum(parts * weight[:, None], 0)
    tl.store(out_ptr + (row * HEADS + head) * WIDTH + d, out.to(out_ptr.dtype.element_ty), mask=d < WIDTH)


def splits_for(programs: int, longest_pages: int) -> int:
    """A power of two: enough programs to fill the chip, never more than there are pages to share."""
    wanted = min(triton.cdiv(WANTED_PROGRAMS, programs), longest_pages, 64)
    return 1 << max(0, wanted.bit_length() - 1)


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, state: PagedState, rows: Tensor, layer: AttentionLayer
) -> Tensor:
    """[n, heads * D] queries and [n, kv_heads * D] new keys and values -> [n, heads * D]. What rows are, in
    `state` and `rows`, must not be written by the very kernel before: this one may begin while that one runs.
    """
    attended = attend(query, key, value, state, rows, layer)
    if attended is not None:
        return attended
    num_rows, heads, kv_heads, width = len(rows), layer.heads, layer.kv_heads, layer.width
    options = layer.options
    splits = splits_for(num_rows * kv_heads, state.table.shape[1])
    out = torch.empty(num_rows, heads * width, dtype=query.dtype, device=query.device)
    partial = lse = out
    if splits > 1:
        partial = torch.empty(num_rows, heads, splits, width, dtype=torch.float32, device=query.device)
        lse = torch.empty(num_rows, heads, splits, dtype=torch.float32, device=query.device)
    rotary, norms = layer.rotary, layer.head_norms
    _attention_kernel[num_rows, kv_heads, splits](
        query, key, value, out, partial, lse,
        *(rotary if rotary is not None else (out, out)),
        *(norms if norms is not None else (out, out)),
        state.bases, state.fields, state.table, rows,
        options.layer, query.stride(0), key.stride(0), value.stride(0), state.num_slots, state.table.shape[1],
        options.sliding_window or 0, options.scale, options.softcap or 0.0, layer.norm_eps,
        HEADS=heads, KV_HEADS=kv_heads, WIDTH=width, HALF_PADDED=max(16, triton.next_power_of_2(width // 2)),
        GROUP_PADDED=max(16, triton.next_power_of_2(heads // kv_heads)), SPLITS=splits, PAGE_SIZE=PAGE,
        TILE=TILE, CACHE_TYPE=TYPES[state.dtype], ROTARY=rotary is not None, NORM=norms is not None,
        NORM_OFFSET=layer.norm_offset, SOFTCAP=options.softcap is not None,
        WINDOW=options.sliding_window is not None, F_ACTIVE=ACTIVE, F_PREFIX=PREFIX, F_OWN=OWN,
        num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[num_rows, heads](
            partial, lse, out, rows, HEADS=heads, WIDTH=width, WIDTH_PADDED=triton.next_power_of_2(width),
            SPLITS=splits,
        )  # fmt: skip
    return out


TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
