"""Linear layers with few rows (linear.cu) on Hopper: the QKV and output projections of a decode step."""

import functools
from dataclasses import dataclass
from pathlib import Path

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

SOURCE = Path(__file__).with_name("linear.cu")
BLOCKS, ROWS, THREADS = 2, 64, 160
MAX_COLUMNS = 192
MAX_ROWS = 256  # above it cuBLAS is faster (benchmarks/decode_products.py)


@dataclass(frozen=True, kw_only=True)
class LinearTile(Tile):
    rows: int = ROWS
    bias: bool

    @property
    def extra_bytes(self) -> int:
        """Sums of the other block, outputs, a barrier."""
        own = self.columns // BLOCKS
        return ROWS * own * 4 + ROWS * (2 * own + 16) + 16

    def macros(self) -> list[str]:
        return [*super().macros(), *definitions(BIAS=self.bias)]


_compiled = functools.cache(functools.partial(compile_kernel, SOURCE, "linear"))


def column_tile(num_rows: int, width: int, num_multiprocessors: int) -> int:
    """Columns of a tile such that there are about as many blocks as multiprocessors."""
    blocks = BLOCKS * -(-num_rows // ROWS)  # per tile of columns
    unit = 8 * BLOCKS
    return unit * -(-width * blocks // (num_multiprocessors * unit))


def try_linear(x: Tensor, fused: FusedLinear) -> Tensor | None:
    """x [n, K] -> x weight^T + bias; None if not supported."""
    if not supports(x, fused):
        return None
    columns = column_tile(len(x), len(fused.weight), multiprocessors(x.device))
    if columns > MAX_COLUMNS:
        return None
    tile = LinearTile(columns=columns, bf16=x.dtype == torch.bfloat16, bias=fused.bias is not None)
    kernel = _compiled(tile, x.device)
    return None if kernel is None else _run(kernel, tile, x, fused)


def _run(kernel: Kernel, tile: LinearTile, x: Tensor, fused: FusedLinear) -> Tensor:
    (num_rows, depth), width = x.shape, len(fused.weight)
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    tiles = -(-num_rows // ROWS)
    tile_rows = rows_per_part(num_rows, tiles)
    inputs = tensor_map(x, [depth, num_rows], [depth], [DEPTH, tile_rows])
    weights = tensor_map(fused.weight, [depth, width], [depth], [DEPTH, tile.columns])
    grid = (BLOCKS, tiles, -(-width // tile.columns))
    bias = out if fused.bias is None else fused.bias  # a dummy where none is read
    numbers = (num_rows, width, -(-depth // DEPTH), tile_rows)
    kernel(grid, THREADS, [inputs, weights, bias, out, *numbers])
    return out


def supports(x: Tensor, fused: FusedLinear) -> bool:
    bias = fused.bias
    return (
        1 <= len(x) <= MAX_ROWS
        and x.shape[1] > DEPTH  # each of the two blocks needs a part
        and fused.adapter is None
        and (bias is None or (bias.dtype == x.dtype and bias.data_ptr() % 4 == 0))
        and supports_tma(x, fused.weight)
    )
