"""The CUDA C++ kernels are one folder behind one entry point: the engine works without it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install -e '.[dev]'")

ROOT = Path(__file__).resolve().parents[2]
HOPPER = "whetstone/engines/native/kernels/hopper"
RUN = """
from tests.engines.kernels_interpreted import CASES
from whetstone.engines.native import kernels

assert kernels.__file__.startswith({folder!r}), kernels.__file__
assert kernels.hopper is None
for name in ("norm and gate", "a step of qwen3"):
    CASES[name]()
"""


@pytest.mark.slow
def test_the_engine_runs_without_the_folder(tmp_path: Path) -> None:
    """Triton's interpreter runs norms and a whole decode step of a copy without the folder."""
    ignore = shutil.ignore_patterns("hopper")  # compiled files are valid in the copy, too
    shutil.copytree(ROOT / "whetstone", tmp_path / "whetstone", ignore=ignore)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    code = RUN.format(folder=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_only_the_entry_point_is_imported_from_outside() -> None:
    inside = ROOT / HOPPER
    for path in (ROOT / "whetstone").rglob("*.py"):
        if not path.is_relative_to(inside):
            assert "kernels.hopper." not in path.read_text(encoding="utf-8"), path
