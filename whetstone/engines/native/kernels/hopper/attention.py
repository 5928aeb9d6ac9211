"""Decode attention for many rows in half precision (attention.cu) on Hopper.

Not for few rows of long sequences, float32, sliding windows, softcaps and other head sizes: the Triton kernel
computes these.
"""

import functools
import logging
from pathlib import Path

import torch
from torch import Tensor

from whetstone.engines.native.kernels.hopper.nvrtc import (
    WARP,
    Kernel,
    Unavailable,
    compile_source,
    definitions,
)
from whetstone.engines.native.slot_state import PAGE, AttentionLayer, PagedState

logger = logging.getLogger("whetstone")

SOURCE = Path(__file__).with_name("attention.cu")
MIN_CAPABILITY = (9, 0)  # Hopper, on which it was measured
HEAD_DIMS, MAX_GROUP = (64, 128), 8
ROWS, WAYS = 2, 2  # rows of a block, warps of a row
LOG2E = 1.4426950408889634
# Rows times KV heads from which it is faster than Triton (benchmarks/decode_attention.py, up to 672 tokens).
# The Triton kernel splits long sequences: there the limit is a guess.
MIN_PROGRAMS, MIN_PROGRAMS_LONG, LONG_PAGES = 96, 528, 32


def try_attention(
    query: Tensor, key: Tensor, value: Tensor, state: PagedState, rows: Tensor, layer: AttentionLayer
) -> Tensor | None:
    """As kernels.attention.decode_attention; None if not supported."""
    kernel = _kernel_for(query, state, rows, layer)
    if kernel is None:
        return None
    num_rows, heads, kv_heads, head_dim = len(rows), layer.heads, layer.kv_heads, layer.head_dim
    out = torch.empty(num_rows, heads * head_dim, dtype=query.dtype, device=query.device)
    grid = (-(-num_rows // ROWS), kv_heads, 1)
    numbers = (layer.options.scale * LOG2E, layer.norm_eps, layer.norm_offset)
    kernel(
        grid,
        32 * WAYS * ROWS,
        [
            query, key, value, out, *(layer.rotary or (out, out)), *(layer.head_norms or (out, out)),
            state.bases, state.slots, state.table, rows,
            layer.options.layer, query.stride(0), key.stride(0), value.stride(0), state.num_slots,
            state.table.shape[1], num_rows, *map(float, numbers),
        ],
        pdl=True,
    )  # fmt: skip
    return out


def _kernel_for(query: Tensor, state: PagedState, rows: Tensor, layer: AttentionLayer) -> Kernel | None:
    group = layer.heads // layer.kv_heads
    if not (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and state.dtype == query.dtype
        and layer.head_dim in HEAD_DIMS
        and group <= MAX_GROUP
        and layer.options.sliding_window is None
        and layer.options.softcap is None
        and all(table.dtype == query.dtype for table in (*(layer.rotary or ()), *(layer.head_norms or ())))
        and fills_gpu(len(rows) * layer.kv_heads, state.table.shape[1])
    ):
        return None
    device = torch.cuda.get_device_properties(query.device)
    if (device.major, device.minor) < MIN_CAPABILITY or shared_bytes(
        layer.head_dim
    ) > device.shared_memory_per_block_optin:
        return None
    kinds = (query.dtype == torch.bfloat16, layer.rotary is not None, layer.head_norms is not None)
    architecture = f"sm_{device.major}{device.minor}"
    return _compiled(layer.head_dim, group, layer.kv_heads, *kinds, architecture, query.device)


def fills_gpu(rows_and_heads: int, longest_pages: int) -> bool:
    """Whether there are enough blocks without splits."""
    return rows_and_heads >= (MIN_PROGRAMS if longest_pages <= LONG_PAGES else MIN_PROGRAMS_LONG)


def shared_bytes(head_dim: int) -> int:
    """Shared memory of a block; attention.cu checks it."""
    warps, row = WAYS * ROWS, 2 * head_dim
    tokens = 2 * PAGE * row + warps * 2 * (PAGE // WAYS) * row
    queries = ROWS * MAX_GROUP * row
    return tokens + queries + 2 * ROWS * row + (ROWS + 2 * warps) * MAX_GROUP * 4


def macros(head_dim: int, group: int, kv_heads: int, bf16: bool, rotary: bool, norm: bool) -> list[str]:
    return definitions(
        WIDTH=head_dim,
        GROUP=group,
        KV_HEADS=kv_heads,
        BFLOAT16=bf16,
        ROTARY=rotary,
        NORM=norm,
        SHARED_BYTES=shared_bytes(head_dim),
    )


@functools.cache
def _compiled(
    head_dim: int,
    group: int,
    kv_heads: int,
    bf16: bool,
    rotary: bool,
    norm: bool,
    architecture: str,
    device: torch.device,
) -> Kernel | None:
    options = macros(head_dim, group, kv_heads, bf16, rotary, norm)
    try:
        binary = compile_source(WARP.read_text() + SOURCE.read_text(), options, architecture)
        return Kernel(binary, "decode_attention", shared_bytes(head_dim), device)
    except Unavailable as reason:
        logger.info(f"The native engine's attention runs in Triton, since {reason}.")
        return None
