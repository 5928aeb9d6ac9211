"""The GPU kernels by Triton's interpreter, on the CPU: each case of *kernels_interpreted.py agrees with plain
torch. The interpreter is chosen when Triton is imported, hence the process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def agreeing(*words: str, module: str = "kernels_interpreted") -> int:
    """How many cases agree; all of them, or the test ends here."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install -e '.[dev]'")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.unit.{module}", *words],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}",
        },
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.count("agrees")


def test_kernels_agree_with_plain_torch():
    assert agreeing() == 17


def test_kernels_of_the_update_agree_with_plain_torch():
    assert agreeing(module="update_kernels_interpreted") == 7


@pytest.mark.slow
def test_every_architecture_is_read_as_blocks_that_agree():
    assert agreeing("more") == 9
