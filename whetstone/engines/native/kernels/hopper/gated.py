"""The first half of an MLP on Hopper, both matrices and the gate in one kernel: how gated.cu is compiled and
called. Whatever it can't do (float32, biases, adapters, odd shapes, other chips) is left to the library.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whetstone.engines.native.fused_linear import Joined
from whetstone.engines.native.kernels.hopper.nvrtc import Kernel, definitions, tensor_map
from whetstone.engines.native.kernels.hopper.tiles import (
    DEPTH,
    LINE,
    MOST_SHARED,
    can_fetch,
    compiled,
    multiprocessors,
    rows_of_part,
)

SOURCE = Path(__file__).with_name("gated.cu")
MOST_COLUMNS, MOST_STAGES = 168, 8  # registers, use
TURN_COLUMNS = 8  # what beginning and ending a tile takes, in columns
BLOCKS, GROUPS = 2, 2
THREADS = 128 * (1 + GROUPS)
MOST_ROWS = 1024  # where it is faster than the library (benchmarks/decode_products.py)


@dataclass(frozen=True)
class Tile:
    """What a block has at a time."""

    rows: int
    columns: int
    gelu: bool
    bf16: bool

    @property
    def stage(self) -> int:
        return (self.rows + self.columns) * LINE

    @property
    def lines(self) -> int:
        """Bytes for outputs on their way, in two passes."""
        return 4 * GROUPS * 16 * 8 * -(-self.columns // 16)

    @property
    def stages(self) -> int:
        return min(MOST_STAGES, (MOST_SHARED - self.lines) // (self.stage + 16))

    @property
    def shared_bytes(self) -> int:
        return self.lines + self.stages * (self.stage + 16)

    def macros(self) -> list[str]:
        return definitions(
            ROWS=self.rows,
            COLUMNS=self.columns,
            STAGES=self.stages,
            GELU=self.gelu,
            BFLOAT16=self.bf16,
            SHARED_BYTES=self.shared_bytes,
        )


def row_tile(num_rows: int) -> int:
    return 128 if num_rows <= 128 else 256


def column_tile(columns: int, num_multiprocessors: int) -> int:
    """Columns of a tile, such that all multiprocessors have the same number of tiles and waste the least."""
    eights = -(-columns // 8)
    fewest = -(-eights // (num_multiprocessors * MOST_COLUMNS // 8))
    turns = min(
        range(fewest, fewest + 4),
        key=lambda turns: turns * (8 * -(-eights // (num_multiprocessors * turns)) + TURN_COLUMNS),
    )
    return 8 * -(-eights // (num_multiprocessors * turns))


def gated_product(like: Tensor, gate_up: Joined, *, gelu: bool) -> Callable[[Tensor], Tensor] | None:
    """x [n, K] -> act(x gates^T) * (x values^T), [n, I], for x like `like`; None if this can't be done here.
    It begins while the kernel before it runs, if that one lets it.
    """
    if not can_multiply(like, gate_up):
        return None
    columns = column_tile(len(gate_up.weight), multiprocessors(like.device))
    tile = Tile(row_tile(len(like)), columns, gelu, like.dtype == torch.bfloat16)
    kernel = _compiled(tile, like.device)
    return None if kernel is None else functools.partial(_run, kernel, tile, gate_up.weight)


def _run(kernel: Kernel, tile: Tile, weight: Tensor, x: Tensor) -> Tensor:
    (num_rows, depth), width = x.shape, len(weight) // 2
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    clusters = -(-len(weight) // (tile.columns * BLOCKS)) * -(-num_rows // tile.rows)
    grid = (BLOCKS * min(clusters, multiprocessors(x.device) // BLOCKS), 1, 1)
    half_rows = rows_of_part(min(num_rows, tile.rows), BLOCKS)
    maps = (input_map(x, half_rows), weight_map(weight, tile))
    kernel(grid, THREADS, [*maps, out, num_rows, width, -(-depth // DEPTH), half_rows], early=True)
    return out


def can_multiply(x: Tensor, joined: Joined) -> bool:
    return 1 <= len(x) <= MOST_ROWS and joined.is_bare and can_fetch(x, joined.weight)


def input_map(x: Tensor, half_rows: int) -> Any:
    """What a block fetches at a time."""
    num_rows, depth = x.shape
    return tensor_map(x, [depth, num_rows], [depth], [DEPTH, half_rows])


def weight_map(weight: Tensor, tile: Tile) -> Any:
    """A tile's columns in eights: four gates and their four values."""
    columns, depth = weight.shape
    sizes, strides = [depth, 4, 2, columns // 8], [depth, columns // 2 * depth, 4 * depth]
    return tensor_map(weight, sizes, strides, [DEPTH, 4, 2, tile.columns // 8])


@functools.cache
def _compiled(tile: Tile, device: torch.device) -> Kernel | None:
    return compiled(SOURCE, "gated_product", tile, device)
