"""Decode attention for many rows in half precision: how attention.cu is compiled and called.

Whatever it can't do is left to the Triton kernel: few rows of long sequences, float32, windows, softcaps,
other widths, and chips before Hopper, on which it was never run.
"""

import functools
import logging
from pathlib import Path

import torch
from torch import Tensor

from whetstone.engines.native.kernels.hopper.nvrtc import Kernel, Unavailable, compile_source, definitions
from whetstone.engines.native.slot_state import PAGE, AttentionLayer, PagedState

logger = logging.getLogger("whetstone")

WARP, SOURCE = (Path(__file__).with_name(name) for name in ("warp.cuh", "attention.cu"))
FIRST_CAPABILITY = (9, 0)  # Hopper, on which it was measured
WIDTHS, MOST_QUERIES = (64, 128), 8
ROWS, WAYS = 2, 2  # of a block, warps of a row
LOG2E = 1.4426950408889634
# Rows times heads of keys and values from which it is the faster one (benchmarks/decode_attention.py, up to
# 672 tokens). The Triton kernel splits long sequences: it has them until the chip is filled without, which is
# a guess.
FEWEST, FEWEST_OF_LONG, LONG_PAGES = 96, 528, 32


def attend(
    query: Tensor, key: Tensor, value: Tensor, state: PagedState, rows: Tensor, layer: AttentionLayer
) -> Tensor | None:
    """As attention.decode_attention; None if this can't be done here."""
    kernel = _kernel_for(query, state, rows, layer)
    if kernel is None:
        return None
    num_rows, heads, kv_heads, width = len(rows), layer.heads, layer.kv_heads, layer.width
    out = torch.empty(num_rows, heads * width, dtype=query.dtype, device=query.device)
    grid = (-(-num_rows // ROWS), kv_heads, 1)
    numbers = (layer.options.scale * LOG2E, layer.norm_eps, layer.norm_offset)
    kernel(
        grid,
        32 * WAYS * ROWS,
        [
            query, key, value, out, *(layer.rotary or (out, out)), *(layer.head_norms or (out, out)),
            state.bases, state.fields, state.table, rows,
            layer.options.layer, query.stride(0), key.stride(0), value.stride(0), state.num_slots,
            state.table.shape[1], num_rows, *map(float, numbers),
        ],
        early=True,
    )  # fmt: skip
    return out


def _kernel_for(query: Tensor, state: PagedState, rows: Tensor, layer: AttentionLayer) -> Kernel | None:
    group = layer.heads // layer.kv_heads
    if not (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and state.dtype == query.dtype
        and layer.width in WIDTHS
        and group <= MOST_QUERIES
        and layer.options.sliding_window is None
        and layer.options.softcap is None
        and all(table.dtype == query.dtype for table in (*(layer.rotary or ()), *(layer.head_norms or ())))
        and are_enough(len(rows) * layer.kv_heads, state.table.shape[1])
    ):
        return None
    device = torch.cuda.get_device_properties(query.device)
    if (device.major, device.minor) < FIRST_CAPABILITY or shared_bytes(
        layer.width
    ) > device.shared_memory_per_block_optin:
        return None
    kinds = (query.dtype == torch.bfloat16, layer.rotary is not None, layer.head_norms is not None)
    architecture = f"sm_{device.major}{device.minor}"
    return _compiled(layer.width, group, layer.kv_heads, *kinds, architecture, query.device)


def are_enough(rows_and_heads: int, longest_pages: int) -> bool:
    """Whether there is enough to do at a time for blocks that split nothing."""
    return rows_and_heads >= (FEWEST if longest_pages <= LONG_PAGES else FEWEST_OF_LONG)


def shared_bytes(width: int) -> int:
    """The shared memory of a block, as attention.cu lays it out (which checks it)."""
    warps, row = WAYS * ROWS, 2 * width
    tokens = 2 * PAGE * row + warps * 2 * (PAGE // WAYS) * row
    queries = ROWS * MOST_QUERIES * row
    return tokens + queries + 2 * ROWS * row + (ROWS + 2 * warps) * MOST_QUERIES * 4


def macros(width: int, group: int, kv_heads: int, bf16: bool, rotary: bool, norm: bool) -> list[str]:
    return definitions(
        WIDTH=width,
        GROUP=group,
        KV_HEADS=kv_heads,
        BFLOAT16=bf16,
        ROTARY=rotary,
        NORM=norm,
        SHARED_BYTES=shared_bytes(width),
    )


@functools.cache
def _compiled(
    width: int,
    group: int,
    kv_heads: int,
    bf16: bool,
    rotary: bool,
    norm: bool,
    architecture: str,
    device: torch.device,
) -> Kernel | None:
    options = macros(width, group, kv_heads, bf16, rotary, norm)
    try:
        binary = compile_source(WARP.read_text() + SOURCE.read_text(), options, architecture)
        return Kernel(binary, "decode_attention", shared_bytes(width), device)
    except Unavailable as reason:
        logger.info(f"The native engine's attention runs in Triton, since {reason}.")
        return None
