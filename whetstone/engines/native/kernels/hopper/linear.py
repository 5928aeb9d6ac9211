"""The small products of a decode step on Hopper: how linear.cu is compiled and called. Whatever it can't do
is left to the library.
"""

import functools
from dataclasses import dataclass
from pathlib import Path

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

SOURCE = Path(__file__).with_name("linear.cu")
BLOCKS, ROWS, THREADS = 2, 64, 160
MOST_COLUMNS, MOST_STAGES = 192, 8
MOST_ROWS = 256  # where it is faster than the library (benchmarks/decode_products.py)


@dataclass(frozen=True)
class Tile:
    """What the two blocks of a cluster have: up to 64 rows, and so many columns."""

    columns: int
    bias: bool
    bf16: bool

    @property
    def rest(self) -> int:
        """Bytes besides the stages: sums of the other block, outputs on their way, a barrier."""
        own = self.columns // BLOCKS
        return ROWS * own * 4 + ROWS * (2 * own + 16) + 16

    @property
    def stages(self) -> int:
        return min(MOST_STAGES, (MOST_SHARED - self.rest) // ((ROWS + self.columns) * LINE + 16))

    @property
    def shared_bytes(self) -> int:
        return self.stages * ((ROWS + self.columns) * LINE + 16) + self.rest

    def macros(self) -> list[str]:
        return definitions(
            COLUMNS=self.columns,
            STAGES=self.stages,
            BIAS=self.bias,
            BFLOAT16=self.bf16,
            SHARED_BYTES=self.shared_bytes,
        )


def column_tile(num_rows: int, width: int, num_multiprocessors: int) -> int:
    """Columns of a tile, such that there are hardly fewer blocks than multiprocessors."""
    blocks = BLOCKS * -(-num_rows // ROWS)  # of a tile of columns
    unit = 8 * BLOCKS
    return unit * -(-width * blocks // (num_multiprocessors * unit))


def linear(x: Tensor, joined: Joined) -> Tensor:
    """x [n, K] -> x weight^T + bias. On Hopper it begins while the kernel before it runs, if that one lets
    it, and lets the next one begin at once.
    """
    if not can_multiply(x, joined):
        return joined(x)
    columns = column_tile(len(x), len(joined.weight), multiprocessors(x.device))
    tile = Tile(columns, joined.bias is not None, x.dtype == torch.bfloat16)
    kernel = _compiled(tile, x.device) if columns <= MOST_COLUMNS else None
    return joined(x) if kernel is None else _run(kernel, tile, x, joined)


def _run(kernel: Kernel, tile: Tile, x: Tensor, joined: Joined) -> Tensor:
    (num_rows, depth), width = x.shape, len(joined.weight)
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    tiles = -(-num_rows // ROWS)
    tile_rows = rows_of_part(num_rows, tiles)
    inputs = tensor_map(x, [depth, num_rows], [depth], [DEPTH, tile_rows])
    weights = tensor_map(joined.weight, [depth, width], [depth], [DEPTH, tile.columns])
    grid = (BLOCKS, tiles, -(-width // tile.columns))
    bias = out if joined.bias is None else joined.bias  # any tensor serves, where none is read
    numbers = (num_rows, width, -(-depth // DEPTH), tile_rows)
    kernel(grid, THREADS, [inputs, weights, bias, out, *numbers], early=True)
    return out


def can_multiply(x: Tensor, joined: Joined) -> bool:
    bias = joined.bias
    return (
        1 <= len(x) <= MOST_ROWS
        and x.shape[1] > DEPTH  # both blocks have a part of it
        and joined.adapter is None
        and (bias is None or (bias.dtype == x.dtype and bias.data_ptr() % 4 == 0))
        and can_fetch(x, joined.weight)
    )


@functools.cache
def _compiled(tile: Tile, device: torch.device) -> Kernel | None:
    return compiled(SOURCE, "linear", tile, device)
