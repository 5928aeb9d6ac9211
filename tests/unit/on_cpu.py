"""Kernels that are written in CUDA, tried on the CPU in processes of their own: threads that wait for each
other for ever end a process.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to compile it with")


def runs(module: str, words: str) -> None:
    """`python -m tests.unit.MODULE WORDS` ends well."""
    command = [sys.executable, "-W", "ignore", "-m", f"tests.unit.{module}", *words.split()]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
