"""The attention that is written in CUDA, on the CPU: each thread of a block a fiber (warp_on_cpu.h)."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install -e '.[dev]'")

from whetstone.engines.native.kernels.attention_cuda import rows_of_block

SLOW = pytest.mark.slow


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to compile it with")
@pytest.mark.parametrize(
    "words",
    [
        "128 2 2 6 bf16",
        "64 1 3 3 fp16 norm",
        pytest.param("64 2 2 7 bf16", marks=SLOW),
        pytest.param("128 1 1 8 bf16 norm", marks=SLOW),
        pytest.param("128 4 2 2 fp16", marks=SLOW),
    ],
)
def test_agrees_with_float64(words):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.cuda_on_cpu", *words.split()]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rows_of_a_block_by_how_many_the_chip_can_hold():
    assert rows_of_block(256, 2, 132) == 2
    assert rows_of_block(1024, 2, 132) == 2
    assert rows_of_block(128, 2, 132) == 1
    assert rows_of_block(64, 8, 132) == 2
    assert rows_of_block(64, 2, 132) == 0
