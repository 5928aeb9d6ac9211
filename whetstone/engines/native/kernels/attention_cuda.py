"""Decode attention for many rows in half precision: how attention.cu is compiled and called.

Whatever it can't do is left to the Triton kernel: few rows of long sequences, float32, windows, softcaps,
other widths, and chips before Hopper, on which it was never run.
"""

import functools
import logging
from pathlib import Path

import torch
from torch import Tensor

from whetstone.engines.native.kernels.cuda import Kernel, Unavailable, compile_source
from whetstone.engines.native.layout import PAGE, AttentionLayer, PagedState

logger = logging.getLogger("whetstone")

WARP, SOURCE = (Path(__file__).with_name(name) for name in ("warp.cuh", "attention.cu"))
FIRST_CAPABILITY = (9, 0)  # Hopper, on which it was measured
WIDTHS, MOST_QUERIES = (64, 128), 8
WAYS = 2  # warps of a row
LOG2E = 1.4426950408889634
FILLED = 0.9  # of what the chip can hold at a time


def rows_of_block(num_rows: int, kv_heads: int, multiprocessors: int) -> int:
    """Rows that share a block, and with it the reading of their prompt: two, where there are enough rows for
    two such blocks on every multiprocessor; else one, four blocks on each; 0 if there are too few for that.
    """
    wanted = FILLED * 4 * multiprocessors
    if num_rows * kv_heads < wanted / 2:
        return 0
    return 2 if num_rows * kv_heads >= wanted else 1


def attend(
    query: Tensor, key: Tensor, value: Tensor, state: PagedState, rows: Tensor, layer: AttentionLayer
) -> Tensor | None:
    """As attention.decode_attention; None if this can't be done here."""
    kernel = _kernel_for(query, state, rows, layer)
    if kernel is None:
        return None
    function, block_rows = kernel
    num_rows, heads, kv_heads, width = len(rows), layer.heads, layer.kv_heads, layer.width
    out = torch.empty(num_rows, heads * width, dtype=query.dtype, device=query.device)
    grid = (-(-num_rows // block_rows), kv_heads, 1)
    function(
        grid,
        32 * WAYS * block_rows,
        [
            query, key, value, out, *(layer.rotary or (out, out)), *(layer.head_norms or (out, out)),
            state.bases, state.fields, state.table, rows,
            layer.options.layer, query.stride(0), key.stride(0), value.stride(0), state.num_slots,
            state.table.shape[1], num_rows, layer.options.scale * LOG2E, layer.norm_eps,
            float(layer.norm_offset),
        ],
    )  # fmt: skip
    return out


def _kernel_for(
    query: Tensor, state: PagedState, rows: Tensor, layer: AttentionLayer
) -> tuple[Kernel, int] | None:
    if not (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and state.dtype == query.dtype
        and layer.width in WIDTHS
        and layer.heads // layer.kv_heads <= MOST_QUERIES
        and layer.options.sliding_window is None
        and layer.options.softcap is None
        and all(table.dtype == query.dtype for table in (*(layer.rotary or ()), *(layer.head_norms or ())))
    ):
        return None
    device = torch.cuda.get_device_properties(query.device)
    if (device.major, device.minor) < FIRST_CAPABILITY:
        return None
    block_rows = rows_of_block(len(rows), layer.kv_heads, device.multi_processor_count)
    if block_rows == 0 or shared_bytes(layer.width, block_rows) > device.shared_memory_per_block_optin:
        return None
    kernel = _compiled(
        layer.width,
        block_rows,
        layer.heads // layer.kv_heads,
        layer.kv_heads,
        query.dtype == torch.bfloat16,
        layer.rotary is not None,
        layer.head_norms is not None,
        f"sm_{device.major}{device.minor}",
    )
    return None if kernel is None else (kernel, block_rows)


def shared_bytes(width: int, rows: int) -> int:
    """The shared memory of a block, as attention.cu lays it out (which checks it)."""
    warps, queries, row = WAYS * rows, MOST_QUERIES, 2 * width
    tokens = (rows // 2 * 2 * PAGE + warps * 2 * (PAGE // WAYS)) * row
    return tokens + rows * queries * row + 2 * rows * row + (rows + 2 * warps) * queries * 4


def macros(
    width: int, rows: int, group: int, kv_heads: int, bf16: bool, rotary: bool, norm: bool
) -> list[str]:
    names = {
        "WIDTH": width,
        "ROWS": rows,
        "GROUP": group,
        "KV_HEADS": kv_heads,
        "BFLOAT16": int(bf16),
        "ROTARY": int(rotary),
        "NORM": int(norm),
        "SHARED_BYTES": shared_bytes(width, rows),
    }
    return [f"-D{name}={value}" for name, value in names.items()]


@functools.cache
def _compiled(
    width: int, rows: int, group: int, kv_heads: int, bf16: bool, rotary: bool, norm: bool, architecture: str
) -> Kernel | None:
    options = macros(width, rows, group, kv_heads, bf16, rotary, norm)
    source = WARP.read_text() + SOURCE.read_text()
    size = shared_bytes(width, rows)
    try:
        return Kernel(compile_source(source, options, architecture), "decode_attention", size)
    except Unavailable as reason:
        logger.info(f"The native engine's attention runs in Triton, since {reason}.")
        return None
