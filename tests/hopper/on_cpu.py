"""Kernels that are written in CUDA, tried on the CPU in processes of their own: threads that wait for each
other for ever end a process.
"""

import os
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.forkserver import CONTEXT

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to compile it with")


def runs(module: str, words: str, said: Path) -> None:
    """`python -m tests.hopper.MODULE WORDS` ends well; what it says goes to the file `said`."""
    process = CONTEXT.Process(target=_run, args=(module, words, said))
    process.start()
    process.join()
    assert process.exitcode == 0, said.read_text()


def _run(module: str, words: str, said: Path) -> None:
    with said.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.argv = [module, *words.split()]
    runpy.run_module(f"tests.hopper.{module}", run_name="__main__")
