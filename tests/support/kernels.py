"""Kernels by Triton's interpreter, in one process for those of all packages: imports take longest.

python -m tests.support.kernels engines optimizer engines.MORE
"""

import importlib
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest


def agreeing(*tables: str) -> dict[str, int]:
    """How many cases of each table of `tests/PACKAGE/kernels_interpreted.py` agree. A failure is printed."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install -e '.[dev]'")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.kernels", *tables],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}",
        },
        cwd=root,
        capture_output=True,
        text=True,
    )
    print(done.stdout, done.stderr)
    lines = done.stdout.splitlines()
    return {table: sum(line.startswith(f"{table} agrees: ") for line in lines) for table in tables}


def main(tables: list[str]) -> None:
    for table in tables:
        package, _, name = table.partition(".")
        try:
            cases = getattr(importlib.import_module(f"tests.{package}.kernels_interpreted"), name or "CASES")
            for title, case in cases.items():
                case()
                print(f"{table} agrees: {title}", flush=True)
        except Exception:  # the other tables have tests of their own
            traceback.print_exc()


if __name__ == "__main__":
    main(sys.argv[1:])
