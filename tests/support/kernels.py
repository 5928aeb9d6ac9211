"""Kernels in a process with Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def agreeing(package: str, *words: str) -> int:
    """How many cases of `tests/PACKAGE/kernels_interpreted.py` agree; all of them, or the test ends here."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install -e '.[dev]'")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.{package}.kernels_interpreted", *words],
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
