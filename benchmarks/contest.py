"""Contenders on the same work, each in a process of its own: one's memory or failure is not another's.

`run` starts a contender's script with a task in JSON and reads the rows that it prints; what fails becomes a
row with the error's last line, its traceback goes to stderr. `Contest` keeps the time limit and the rows, and
writes them with date, machine and versions after every contender. Knows nothing of what is compared.
"""

import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Row = dict[str, Any]
HERE = Path(__file__).resolve().parent
REPEATS = 2  # measured steps of everyone, after one to warm up; the best counts
PACKAGES = ("torch", "transformers", "triton", "trl", "vllm", "whetstone")


@dataclass
class Contest:
    """The rows so far, and how long there may be more of them."""

    script: str  # of a contender, beside this file
    identity: tuple[str, ...]  # the columns that tell one row from another
    about: Row  # machine, work, command: what stands above the rows
    out: Path | None  # None: nothing is written
    limit_s: float
    finish: Callable[[list[Row]], None]  # fills in what compares rows with each other
    rows: list[Row] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        return self.limit_s - (time.monotonic() - self.begun)

    def run(self, task: Row, *, at_least_s: float = 20.0) -> None:
        """One contender; skipped with a word where there is no time for it."""
        name = " ".join(str(task[key]) for key in ("who", "size"))
        if self.left_s < at_least_s:
            return print(
                f"{name}: left out, {self.left_s:.0f} s of {self.limit_s:.0f} s are left", flush=True
            )
        print(f"{name} ... ({self.left_s:.0f} s left)", flush=True)
        load = round(os.getloadavg()[0], 2)  # of the machine's last minute: whether others were at work
        self.rows += [{**row, "load_before": load} for row in start(self.script, task, self.left_s)]
        self.finish(self.rows)
        if self.out is not None:
            keep(self.out, self.rows, self.identity, self.about, self.finish)


def start(script: str, task: Row, limit_s: float) -> list[Row]:
    """Run a script with a task; returns its rows, and one with an error where it died or took too long."""
    paths = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-u", script, json.dumps(task)],
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    late = threading.Event()

    def end() -> None:
        late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(max(1.0, limit_s), end)
    timer.start()
    rows = []
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ROW "):
            rows.append(json.loads(line[4:]))
            print(json.dumps(rows[-1]), flush=True)
        elif line.strip():
            print(f"  {line.rstrip()}", flush=True)
    code = process.wait()
    timer.cancel()
    if code != 0:
        error = "stopped at the time limit" if late.is_set() else f"the process ended with exit code {code}"
        known = {"settings": task["setting"]} if "setting" in task else {}
        rows.append({"who": task["who"], "size": task["size"], **known, "error": error})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def tell(row: Row) -> None:
    """A contender's row, for whoever started it."""
    print("ROW " + json.dumps(row), flush=True)


def attempt(row: Row, measure: Callable[[], Row]) -> bool:
    """Measure and tell; a failure is told too, and is the end of nothing else."""
    try:
        tell({**row, **measure()})
    except Exception as error:  # whatever another package came to: out of memory above all
        traceback.print_exc()
        text = str(error).strip().splitlines()
        tell({**row, "error": f"{type(error).__name__}: {text[-1] if text else ''}"[:300]})
        return False
    return True


def keep(
    path: Path, rows: list[Row], identity: tuple[str, ...], about: Row, finish: Callable[[list[Row]], None]
) -> None:
    """New rows replace those of the same identity; the others stay, with their own date and versions."""
    for row in rows:
        row.setdefault("date", time.strftime("%Y-%m-%d"))
        row.setdefault("versions", versions())
    new = {identity_of(row, identity) for row in rows}
    kept = json.loads(path.read_text())["rows"] if path.is_file() else []
    rows = [row for row in kept if identity_of(row, identity) not in new] + rows
    finish(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def identity_of(row: Row, identity: tuple[str, ...]) -> str:
    return json.dumps([row.get(key) for key in identity])


def table(rows: list[Row], columns: tuple[str, ...]) -> str:
    """Rows as Markdown; what failed says so in its last column."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = [_cell(row.get(column)) for column in columns]
        if "error" in row:
            cells[-1] = row["error"].replace("|", "/")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def into_docs(name: str, text: str, path: Path = HERE.parent / "docs" / "lab" / "update.md") -> None:
    """Put a table between the two comments that keep its place."""
    before, rest = path.read_text().split(f"<!-- {name} -->\n", 1)
    after = rest.split("<!-- end -->", 1)[1]
    path.write_text(f"{before}<!-- {name} -->\n{text}\n<!-- end -->{after}")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine() -> str:
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, {platform.machine()}"
    return f"{platform.machine()}, {os.cpu_count()} cores, CPU"


def matrix_rate(device: str) -> float:
    """Operations a second of one large matrix product: bf16, 8192 cubed on a GPU, float32, 2048 cubed on a
    CPU.
    """
    import torch

    is_gpu = device == "cuda"
    size, repeats = (8192, 20) if is_gpu else (2048, 3)
    dtype = torch.bfloat16 if is_gpu else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(4):
        begun = time.perf_counter()
        for _ in range(repeats):
            torch.mm(a, b)
        if is_gpu:
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - begun) / repeats)
    del a, b
    if is_gpu:
        torch.cuda.empty_cache()
    return 2 * size**3 / best
