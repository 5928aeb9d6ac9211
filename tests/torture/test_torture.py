"""The campaign runs, and loses nothing in a slice."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def command(folder: Path, *words: str, timeout_s: float) -> tuple[int, dict]:
    """A campaign in a process of its own: this one has computed with torch, which forks badly."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.torture", "--folder", str(folder), *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert (folder / "table.json").is_file(), done.stdout[-2000:] + done.stderr[-2000:]
    return done.returncode, json.loads((folder / "table.json").read_text())


def test_a_tiny_slice(tmp_path: Path) -> None:
    code, summary = command(tmp_path / "c", "--only", "programs,commands", "--first", "1", timeout_s=300)
    assert code == 0, summary["losses"]
    commands = next(part for part in summary["parts"] if part["part"] == "commands")
    assert (commands["tried"], commands["survived"], commands["lost"]) == (1, 1, 0)
    assert summary["complete"]


@pytest.mark.slow
def test_a_slice_of_ten_minutes(tmp_path: Path) -> None:
    code, summary = command(tmp_path / "c", "--minutes", "10", timeout_s=3000)
    assert code == 0, summary["losses"]
    assert sum(part["tried"] for part in summary["parts"]) > 50
