"""Decode attention for many rows in half precision (attention.cu) on Hopper; Triton computes the rest."""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from whetstone.engines.native.kernels.hopper.nvrtc import Kernel, Variant, compile_kernel, definitions
from whetstone.engines.native.slot_state import PAGE, AttentionLayer, PagedState

SOURCE = Path(__file__).with_name("attention.cu")
MIN_CAPABILITY = (9, 0)  # Hopper, on which it was measured
HEAD_DIMS, MAX_GROUP = (64, 128), 8
ROWS, WAYS = 2, 2  # rows of a block, warps of a row
LOG2E = 1.4426950408889634
# Rows times KV heads from which it is faster than Triton (benchmarks/decode_attention.py, up to 672 tokens).
# The Triton kernel splits long sequences: there the limit is a guess.
MIN_PROGRAMS, MIN_PROGRAMS_LONG, LONG_PAGES = 96, 528, 32


@dataclass(frozen=True, kw_only=True)
class AttentionVariant(Variant):
    head_dim: int
    group: int
    kv_heads: int
    rotary: bool
    norm: bool

    @property
    def shared_bytes(self) -> int:
        warps, row = WAYS * ROWS, 2 * self.head_dim
        tokens = 2 * PAGE * row + warps * 2 * (PAGE // WAYS) * row
        queries = ROWS * MAX_GROUP * row
        return tokens + queries + 2 * ROWS * row + (ROWS + 2 * warps) * MAX_GROUP * 4

    def macros(self) -> list[str]:
        sizes = definitions(WIDTH=self.head_dim, GROUP=self.group, KV_HEADS=self.kv_heads)
        return [*super().macros(), *sizes, *definitions(ROTARY=self.rotary, NORM=self.norm)]


_compiled = functools.cache(functools.partial(compile_kernel, SOURCE, "decode_attention"))


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
    arguments = [
        query, key, value, out, *(layer.rotary or (out, out)), *(layer.head_norms or (out, out)),
        state.bases, state.slots, state.table, rows,
        layer.options.layer, query.stride(0), key.stride(0), value.stride(0), state.num_slots,
        state.table.shape[1], num_rows, *map(float, numbers),
    ]  # fmt: skip
    kernel(grid, 32 * WAYS * ROWS, arguments)
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
    variant = AttentionVariant(
        bf16=query.dtype == torch.bfloat16,
        architecture=f"sm_{device.major}{device.minor}",
        head_dim=layer.head_dim,
        group=group,
        kv_heads=layer.kv_heads,
        rotary=layer.rotary is not None,
        norm=layer.head_norms is not None,
    )
    is_hopper = (device.major, device.minor) >= MIN_CAPABILITY
    fits = variant.shared_bytes <= device.shared_memory_per_block_optin
    return _compiled(variant, query.device) if is_hopper and fits else None


def fills_gpu(rows_and_heads: int, longest_pages: int) -> bool:
    """Whether there are enough blocks without splits."""
    return rows_and_heads >= (MIN_PROGRAMS if longest_pages <= LONG_PAGES else MIN_PROGRAMS_LONG)
