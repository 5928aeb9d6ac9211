"""The attention that is written in CUDA, on the CPU: each thread of a block a fiber (warp_on_cpu.h)."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install -e '.[dev]'")

from tests.hopper.on_cpu import NEEDS_COMPILER, runs
from whetstone.engines.native.kernels.hopper.attention import fills_gpu

SLOW = pytest.mark.slow


@NEEDS_COMPILER
@pytest.mark.parametrize(
    "words",
    [
        "128 2 6 bf16",
        pytest.param("64 2 3 fp16 norm", marks=SLOW),
        pytest.param("64 2 7 bf16", marks=SLOW),
        pytest.param("128 1 8 bf16 norm", marks=SLOW),
        pytest.param("128 2 2 fp16", marks=SLOW),
    ],
)
def test_agrees_with_float64(words, tmp_path):
    runs("attention_on_cpu", words, tmp_path / "said")


def test_it_takes_many_rows_and_leaves_few_long_ones_to_splits():
    assert fills_gpu(2 * 48, 12)
    assert not fills_gpu(2 * 32, 12)
    assert not fills_gpu(2 * 128, 300)
    assert fills_gpu(2 * 1024, 300)
