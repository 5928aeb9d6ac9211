"""The small products that are written in CUDA, on the CPU: each thread of a cluster a fiber
(hopper_on_cpu.h).
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install -e '.[dev]'")

from tests.hopper.on_cpu import NEEDS_COMPILER, runs
from whetstone.engines.native.fused_linear import FusedLinear
from whetstone.engines.native.kernels.hopper.linear import LinearTile, column_tile, try_linear
from whetstone.engines.native.kernels.hopper.tiles import MAX_SHARED_BYTES

SLOW = pytest.mark.slow


@NEEDS_COMPILER
@pytest.mark.parametrize(
    "words",  # rows, depth, width, multiprocessors
    [
        # Neither rows nor columns nor depth are whole tiles; the blocks of a cluster have 4 and 5 steps.
        "200 520 136 16 bf16 bias late and 5 400 72 8 fp16",
        pytest.param("200 520 136 16 bf16 bias and 72 840 136 24 fp16 late", marks=SLOW),
        pytest.param("60 840 264 8 bf16 bias late and 256 1536 256 16 bf16", marks=SLOW),
    ],
)
def test_agrees_with_float64(words, tmp_path):
    runs("linear_on_cpu", words, tmp_path / "said")


@pytest.mark.parametrize("rows", [65, 128, 192, 256])
@pytest.mark.parametrize("width", [896, 1152, 1536, 2048, 2560])
def test_there_are_hardly_fewer_blocks_than_multiprocessors(rows, width):
    columns = column_tile(rows, width, 132)
    blocks = 2 * -(-rows // 64) * -(-width // columns)
    assert 132 * 0.7 < blocks <= 132
    tile = LinearTile(columns=columns, bias=True, bf16=True)
    assert tile.stages >= 5
    assert tile.shared_bytes <= MAX_SHARED_BYTES


def test_it_is_for_hopper_only():
    layer = torch.nn.Linear(128, 24).requires_grad_(False)
    x = torch.randn(100, 128)
    assert try_linear(x, FusedLinear([layer])) is None
