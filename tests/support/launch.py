"""`whet launch` as a process."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.support.runs import rows, words

ROOT = Path(__file__).resolve().parents[2]


FLAGS = ["--ray", "--ranks", "2", "--gpus-per-rank", "0", "--cpus-per-rank", "0.5"]


class Launched:
    """`whet launch` as a process of its own on a Ray of its own."""

    def __init__(self, folder, flags, **settings):
        self.folder = folder
        path = f"{ROOT}:{ROOT / 'tests' / 'data' / 'stand_in'}"
        quiet = {"OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", "RAY_DEDUP_LOGS": "0"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "whetstone", "launch", *flags, "train", *words(folder, **settings)],
            env={**os.environ, **quiet, "RAY_ADDRESS": "local", "PYTHONPATH": path},
            stdout=(folder / "said").open("wb"),
            stderr=subprocess.STDOUT,
        )

    @property
    def said(self):
        return (self.folder / "said").read_text(errors="replace")

    def wait_for(self, is_so, timeout_s=180.0):
        begun = time.monotonic()
        while not is_so():
            assert self.process.poll() is None and time.monotonic() - begun < timeout_s, self.said
            time.sleep(0.1)

    def wait_for_step(self, step):
        metrics = self.folder / "run" / "metrics.jsonl"
        self.wait_for(lambda: metrics.is_file() and len(rows(self.folder, "train")) >= step)

    def end(self, timeout_s=180.0):
        try:
            return self.process.wait(timeout_s)
        finally:
            self.process.kill()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.terminate()
            self.end(60)


def processes(*texts):
    """Those whose command line holds all of these."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if all(text in line for text in texts):
                found.append(int(folder.name))
    return found
