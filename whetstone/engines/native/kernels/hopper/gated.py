"""The MLP's gate and up projection and its activation in one kernel (gated.cu) on Hopper."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whetstone.engines.native.fused_linear import FusedLinear
from whetstone.engines.native.kernels.hopper.nvrtc import Kernel, compile_kernel, definitions, tensor_map
from whetstone.engines.native.kernels.hopper.tiles import (
    DEPTH,
    Tile,
    multiprocessors,
    rows_per_part,
    supports_tma,
)

SOURCE = Path(__file__).with_name("gated.cu")
MAX_COLUMNS = 168  # limited by registers
TURN_COLUMNS = 8  # overhead of a tile, in columns
BLOCKS, GROUPS = 2, 2
THREADS = 128 * (1 + GROUPS)
MAX_ROWS = 1024  # above it cuBLAS is faster (benchmarks/decode_products.py)


@dataclass(frozen=True, kw_only=True)
class GateUpTile(Tile):
    gelu: bool

    @property
    def extra_bytes(self) -> int:
        """Outputs, stored in two passes."""
        return 4 * GROUPS * 16 * 8 * -(-self.columns // 16)

    def macros(self) -> list[str]:
        return [*super().macros(), *definitions(ROWS=self.rows, GELU=self.gelu)]


_compiled = functools.cache(functools.partial(compile_kernel, SOURCE, "gate_up"))


def row_tile(num_rows: int) -> int:
    return 128 if num_rows <= 128 else 256


def column_tile(columns: int, num_multiprocessors: int) -> int:
    """Columns of a tile such that all multiprocessors get the same number of tiles with the least waste."""
    eights = -(-columns // 8)
    fewest = -(-eights // (num_multiprocessors * MAX_COLUMNS // 8))
    turns = min(
        range(fewest, fewest + 4),
        key=lambda turns: turns * (8 * -(-eights // (num_multiprocessors * turns)) + TURN_COLUMNS),
    )
    return 8 * -(-eights // (num_multiprocessors * turns))


def try_gate_up(like: Tensor, gate_up: FusedLinear, *, gelu: bool) -> Callable[[Tensor], Tensor] | None:
    """x [n, K] -> act(x gates^T) * (x values^T), [n, I], for x like `like`; None if not supported."""
    if not supports(like, gate_up):
        return None
    columns = column_tile(len(gate_up.weight), multiprocessors(like.device))
    tile = GateUpTile(rows=row_tile(len(like)), columns=columns, bf16=like.dtype == torch.bfloat16, gelu=gelu)
    kernel = _compiled(tile, like.device)
    return None if kernel is None else functools.partial(_run, kernel, tile, gate_up.weight)


def _run(kernel: Kernel, tile: GateUpTile, weight: Tensor, x: Tensor) -> Tensor:
    (num_rows, depth), width = x.shape, len(weight) // 2
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    clusters = -(-len(weight) // (tile.columns * BLOCKS)) * -(-num_rows // tile.rows)
    grid = (BLOCKS * min(clusters, multiprocessors(x.device) // BLOCKS), 1, 1)
    half_rows = rows_per_part(min(num_rows, tile.rows), BLOCKS)
    inputs = tensor_map(x, [depth, num_rows], [depth], [DEPTH, half_rows])
    maps = (inputs, weight_map(weight, tile))
    kernel(grid, THREADS, [*maps, out, num_rows, width, -(-depth // DEPTH), half_rows])
    return out


def supports(x: Tensor, fused: FusedLinear) -> bool:
    return 1 <= len(x) <= MAX_ROWS and fused.has_no_bias_or_lora and supports_tma(x, fused.weight)


def weight_map(weight: Tensor, tile: GateUpTile) -> Any:
    """A tile's columns in groups of eight: four gates and their four values."""
    columns, depth = weight.shape
    sizes, strides = [depth, 4, 2, columns // 8], [depth, columns // 2 * depth, 4 * depth]
    return tensor_map(weight, sizes, strides, [DEPTH, 4, 2, tile.columns // 8])
