"""The attention that is written in CUDA, on the CPU: each thread of a block a fiber (warp_on_cpu.h)."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install -e '.[dev]'")

from whetstone.engines.native.kernels.attention_cuda import are_enough

SLOW = pytest.mark.slow


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to compile it with")
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
def test_agrees_with_float64(words):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.cuda_on_cpu", *words.split()]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_takes_many_rows_and_leaves_few_long_ones_to_splits():
    assert are_enough(2 * 48, 12)
    assert not are_enough(2 * 32, 12)
    assert not are_enough(2 * 128, 300)
    assert are_enough(2 * 1024, 300)
