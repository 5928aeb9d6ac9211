"""The first half of an MLP that is written in CUDA, on the CPU: each thread of a cluster a fiber
(hopper_on_cpu.h).
"""

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install -e '.[dev]'")

from tests.hopper.on_cpu import NEEDS_COMPILER, runs
from whetstone.engines.native.kernels.hopper.gated import GateUpTile, column_tile
from whetstone.engines.native.kernels.hopper.tiles import MAX_SHARED_BYTES

SLOW = pytest.mark.slow


@NEEDS_COMPILER
@pytest.mark.parametrize(
    "words",  # rows, depth, width, columns of a tile, multiprocessors
    [
        # Neither rows nor columns nor depth are whole tiles; two tiles one after the other.
        "200 328 100 136 2 bf16 silu late and 300 720 48 32 2 fp16 gelu",
        pytest.param("200 328 100 136 2 bf16 silu", marks=SLOW),
        pytest.param("300 400 116 72 4 bf16 silu late", marks=SLOW),
        pytest.param("100 720 260 136 4 bf16 gelu", marks=SLOW),
    ],
)
def test_agrees_with_float64(words, tmp_path):
    runs("gated_on_cpu", words, tmp_path / "said")


@pytest.mark.parametrize(
    ("columns", "tile", "turns"),
    [(2 * 4864, 80, 1), (2 * 8960, 136, 1), (2 * 11008, 168, 1), (2 * 18944, 144, 2), (8, 8, 1)],
)
def test_all_multiprocessors_have_as_many_tiles(columns, tile, turns):
    assert column_tile(columns, 132) == tile
    assert (turns - 1) * 132 * tile < columns <= turns * 132 * tile


@pytest.mark.parametrize("rows", [128, 256])
@pytest.mark.parametrize("columns", [8, 80, 136, 168])
def test_a_block_has_several_stages_in_its_memory(rows, columns):
    tile = GateUpTile(rows=rows, columns=columns, gelu=False, bf16=True)
    assert tile.stages >= 4
    assert tile.shared_bytes <= MAX_SHARED_BYTES
