"""Triton kernels for attention of packed segments on a Hopper GPU, forwards and backwards.

The query heads of a key head are rows of one tile, token by token: a tile of 128 rows and six heads has 21
tokens, so little of it is masked. Keys of a shared prompt are read where they are, by every segment that sees
them, and their gradients are summed in one program or in a fixed order. Which tile has what is in tables
(attention_tiles.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from whetstone.model.attention_tiles import KEY_TILE, QUERY_TILE, lse_shape

LOG2_E = 1.4426950408889634


@triton.jit
def _tokens(position, tile, RUNS: tl.constexpr):
    """Where the keys of these positions are: in earlier runs, one after the other, then in the segment."""
    start, before = tl.load(tile + 2), tl.load(tile + 3)
    shift = tl.zeros_like(position) + start - before
    for run in tl.static_range(RUNS - 1, -1, -1):
        end = tl.load(tile + 5 + 2 * run)
        begin = tl.load(tile + 3 + 2 * run) if run > 0 else 0
        shift = tl.where(position < end, tl.load(tile + 4 + 2 * run) - begin, shift)
    return position + shift


@triton.jit
def _index(token, LONG: tl.constexpr):
    """For a product with a stride: 64 bits, or 32 where they are enough, which takes fewer registers."""
    return token.to(tl.int64) if LONG else token


@triton.jit
def _rows(tile, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Of a tile of queries: tokens, heads, positions of the tokens, which rows there are, number of keys."""
    first, end, start, before = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    row = tl.arange(0, ROWS)
    token = first + row // GROUP
    last = tl.minimum(first + ROWS // GROUP, end)
    return token, row % GROUP, token - start + before, token < last, last - start + before


@triton.jit
def _attention_forward_kernel(
    query_ptr, key_ptr, value_ptr, out_ptr, lse_ptr, tiles_ptr, scale,
    query_stride, key_stride, value_stride, lse_stride, heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, RUNS: tl.constexpr,
    LONG: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    tile, kv_head = tiles_ptr + tl.program_id(0) * COLUMNS, tl.program_id(1)
    token, head, position, inside, num_keys = _rows(tile, GROUP, ROWS)
    lse_at = kv_head * lse_stride + token * GROUP + head
    head += kv_head * GROUP
    column = tl.arange(0, HEAD_DIM)
    at = _index(token, LONG)[:, None] * query_stride + head[:, None] * HEAD_DIM + column[None, :]
    query = tl.load(query_ptr + at, mask=inside[:, None], other=0.0)
    key_ptr += kv_head * HEAD_DIM
    value_ptr += kv_head * HEAD_DIM
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    for start in range(0, num_keys, KEYS):
        seen = start + tl.arange(0, KEYS)
        source = _index(_tokens(seen, tile, RUNS), LONG)
        known = (seen < num_keys)[:, None]
        key = tl.load(key_ptr + source[:, None] * key_stride + column[None, :], mask=known, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee")
        score = tl.where(seen[None, :] <= position[:, None], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1) * scale)
        weight = tl.exp2(score * scale - higher[:, None])
        old = tl.exp2(top - higher)
        total = total * old + tl.sum(weight, 1)
        value = tl.load(value_ptr + source[:, None] * value_stride + column[None, :], mask=known, other=0.0)
        out = tl.dot(weight.to(value.dtype), value, out * old[:, None], input_precision="ieee")
        top = higher
    out = out / total[:, None]
    at = (_index(token, LONG) * heads + head)[:, None] * HEAD_DIM + column[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside[:, None])
    tl.store(lse_ptr + lse_at, top + tl.log2(total), mask=inside)


@triton.jit
def _attention_query_kernel(
    query_ptr, key_ptr, value_ptr, out_ptr, gradient_ptr, lse_ptr, delta_ptr, query_gradient_ptr, tiles_ptr,
    scale, factor, query_stride, key_stride, value_stride, lse_stride, heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, RUNS: tl.constexpr,
    LONG: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    tile, kv_head = tiles_ptr + tl.program_id(0) * COLUMNS, tl.program_id(1)
    token, head, position, inside, num_keys = _rows(tile, GROUP, ROWS)
    lse_at = kv_head * lse_stride + token * GROUP + head
    head += kv_head * GROUP
    column = tl.arange(0, HEAD_DIM)
    there = inside[:, None]
    at = _index(token, LONG)[:, None] * query_stride + head[:, None] * HEAD_DIM + column[None, :]
    query = tl.load(query_ptr + at, mask=there, other=0.0)
    at = (_index(token, LONG) * heads + head)[:, None] * HEAD_DIM + column[None, :]
    gradient = tl.load(gradient_ptr + at, mask=there, other=0.0)
    out = tl.load(out_ptr + at, mask=there, other=0.0)
    delta = tl.sum(out.to(tl.float32) * gradient.to(tl.float32), 1)
    tl.store(delta_ptr + lse_at, delta, mask=inside)
    lse = tl.load(lse_ptr + lse_at, mask=inside, other=float("inf"))
    key_ptr += kv_head * HEAD_DIM
    value_ptr += kv_head * HEAD_DIM
    total = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    for start in range(0, num_keys, KEYS):
        seen = start + tl.arange(0, KEYS)
        source = _index(_tokens(seen, tile, RUNS), LONG)
        known = (seen < num_keys)[:, None]
        key = tl.load(key_ptr + source[:, None] * key_stride + column[None, :], mask=known, other=0.0)
        value = tl.load(value_ptr + source[:, None] * value_stride + column[None, :], mask=known, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee")
        weight = tl.exp2(score * scale - lse[:, None])
        weight = tl.where(seen[None, :] <= position[:, None], weight, 0.0)
        pull = tl.dot(gradient, tl.trans(value), input_precision="ieee")
        change = (weight * (pull - delta[:, None])).to(key.dtype)
        total = tl.dot(change, key, total, input_precision="ieee")
    total = (total * factor).to(query_gradient_ptr.dtype.element_ty)
    tl.store(query_gradient_ptr + at, total, mask=there)


@triton.jit
def _attention_key_kernel(
    query_ptr, key_ptr, value_ptr, gradient_ptr, lse_ptr, delta_ptr,
    key_gradient_ptr, value_gradient_ptr, parts_ptr, items_ptr,
    scale, factor, query_stride, key_stride, value_stride, lse_stride, heads,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, LONG: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    item, kv_head = items_ptr + tl.program_id(0) * COLUMNS, tl.program_id(1)
    first, end = tl.load(item), tl.load(item + 1)  # keys
    row_start, row_end = tl.load(item + 2) * GROUP, tl.load(item + 3) * GROUP
    part = tl.load(item + 4)
    key_token = first + tl.arange(0, KEYS)
    column = tl.arange(0, HEAD_DIM)
    known = (key_token < end)[:, None]
    key_at = _index(key_token, LONG)[:, None]
    start = kv_head * HEAD_DIM + column[None, :]
    key = tl.load(key_ptr + key_at * key_stride + start, mask=known, other=0.0)
    value = tl.load(value_ptr + key_at * value_stride + start, mask=known, other=0.0)
    key_sum = tl.zeros((KEYS, HEAD_DIM), tl.float32)
    value_sum = tl.zeros((KEYS, HEAD_DIM), tl.float32)
    for begin in range(row_start // 16 * 16, row_end, ROWS):
        row = begin + tl.arange(0, ROWS)
        inside = (row >= row_start) & (row < row_end)
        # Unmasked, which loads several at a time: others are there too, and have no weight below.
        lse = tl.load(lse_ptr + kv_head * lse_stride + row)
        delta = tl.load(delta_ptr + kv_head * lse_stride + row)
        token = row // GROUP
        head = kv_head * GROUP + row % GROUP
        at = _index(token, LONG)[:, None] * query_stride + head[:, None] * HEAD_DIM + column[None, :]
        query = tl.load(query_ptr + at, mask=inside[:, None], other=0.0)
        at = (_index(token, LONG) * heads + head)[:, None] * HEAD_DIM + column[None, :]
        gradient = tl.load(gradient_ptr + at, mask=inside[:, None], other=0.0)
        token = tl.where(inside, token, -1)
        score = tl.dot(key, tl.trans(query), input_precision="ieee")  # [KEYS, ROWS]
        weight = tl.exp2(score * scale - lse[None, :])
        weight = tl.where(key_token[:, None] <= token[None, :], weight, 0.0)
        value_sum = tl.dot(weight.to(query.dtype), gradient, value_sum, input_precision="ieee")
        pull = tl.dot(value, tl.trans(gradient), input_precision="ieee")
        change = (weight * (pull - delta[None, :])).to(query.dtype)
        key_sum = tl.dot(change, query, key_sum, input_precision="ieee")
    key_sum *= factor
    if part < 0:
        final = (key_at * tl.num_programs(1) + kv_head) * HEAD_DIM + column[None, :]
        tl.store(key_gradient_ptr + final, key_sum.to(key_gradient_ptr.dtype.element_ty), mask=known)
        tl.store(value_gradient_ptr + final, value_sum.to(value_gradient_ptr.dtype.element_ty), mask=known)
    else:
        base = parts_ptr + (part.to(tl.int64) * tl.num_programs(1) + kv_head) * 2 * KEYS * HEAD_DIM
        target = base + tl.arange(0, KEYS)[:, None] * HEAD_DIM + column[None, :]
        tl.store(target, tl.where(known, key_sum, 0.0))
        tl.store(target + KEYS * HEAD_DIM, tl.where(known, value_sum, 0.0))


@triton.jit
def _attention_sum_kernel(
    key_gradient_ptr, value_gradient_ptr, parts_ptr, sums_ptr,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, LONG: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    item, kv_head, kv_heads = sums_ptr + tl.program_id(0) * COLUMNS, tl.program_id(1), tl.num_programs(1)
    first, end = tl.load(item), tl.load(item + 1)
    part, num_parts = tl.load(item + 2).to(tl.int64), tl.load(item + 3)
    index = tl.arange(0, KEYS)
    column = tl.arange(0, HEAD_DIM)
    inner = index[:, None] * HEAD_DIM + column[None, :]
    size = 2 * KEYS * HEAD_DIM
    total = tl.zeros((KEYS, HEAD_DIM), tl.float32)
    which = tl.program_id(2)  # keys, values
    for number in range(num_parts):
        base = parts_ptr + ((part + number) * kv_heads + kv_head) * size + which * (KEYS * HEAD_DIM)
        total += tl.load(base + inner)
    at = (_index(first + index, LONG)[:, None] * kv_heads + kv_head) * HEAD_DIM + column[None, :]
    known = (first + index < end)[:, None]
    if which == 0:
        tl.store(key_gradient_ptr + at, total.to(key_gradient_ptr.dtype.element_ty), mask=known)
    else:
        tl.store(value_gradient_ptr + at, total.to(value_gradient_ptr.dtype.element_ty), mask=known)


def forward(
    query: Tensor, key: Tensor, value: Tensor, tiles: Tensor, num_pieces: int, scale: float
) -> tuple[Tensor, Tensor]:
    """[T, heads, D] queries, [T, kv_heads, D] keys and values -> [T, heads, D], and log2 of their sums."""
    num_tokens, heads, head_dim = query.shape
    kv_heads = key.shape[1]
    out = torch.empty(num_tokens, heads, head_dim, dtype=query.dtype, device=query.device)
    lse = query.new_zeros(lse_shape(query, key), dtype=torch.float32)
    _attention_forward_kernel[len(tiles), kv_heads](
        query, key, value, out, lse, tiles, scale * LOG2_E,
        query.stride(0), key.stride(0), value.stride(0), lse.stride(0), heads,
        GROUP=heads // kv_heads, HEAD_DIM=head_dim, COLUMNS=tiles.shape[1], RUNS=num_pieces - 1,
        LONG=_is_long(query, key, value), **QUERY_TILE,
    )  # fmt: skip
    return out, lse


def _is_long(*tensors: Tensor) -> bool:
    return max(len(tensor) * max(tensor.stride(0), tensor[0].numel()) for tensor in tensors) >= 2**31


def backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
    tiles: Tensor, items: Tensor, sums: Tensor, num_pieces: int, num_parts: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of queries, keys and values, contiguous."""
    _, heads, head_dim = query.shape
    kv_heads = key.shape[1]
    delta = torch.zeros_like(lse)
    query_gradient = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    key_gradient, value_gradient = (
        torch.empty(key.shape, dtype=key.dtype, device=key.device) for _ in range(2)
    )
    strides = (query.stride(0), key.stride(0), value.stride(0), lse.stride(0), heads)
    shape = {"GROUP": heads // kv_heads, "HEAD_DIM": head_dim, "LONG": _is_long(query, key, value)}
    _attention_query_kernel[len(tiles), kv_heads](
        query, key, value, out, gradient, lse, delta, query_gradient, tiles, scale * LOG2_E, scale, *strides,
        **shape, COLUMNS=tiles.shape[1], RUNS=num_pieces - 1, **QUERY_TILE,
    )  # fmt: skip
    parts = lse.new_empty(num_parts, kv_heads, 2, KEY_TILE["KEYS"], head_dim)
    _attention_key_kernel[len(items), kv_heads](
        query, key, value, gradient, lse, delta, key_gradient, value_gradient, parts, items,
        scale * LOG2_E, scale, *strides, **shape, COLUMNS=items.shape[1], **KEY_TILE,
    )  # fmt: skip
    if len(sums):
        _attention_sum_kernel[len(sums), kv_heads, 2](
            key_gradient, value_gradient, parts, sums,
            HEAD_DIM=head_dim, COLUMNS=sums.shape[1], LONG=shape["LONG"], KEYS=KEY_TILE["KEYS"],
        )  # fmt: skip
    return query_gradient, key_gradient, value_gradient
