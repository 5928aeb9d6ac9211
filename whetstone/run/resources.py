"""What a run uses of its machine: GPU, host memory, disk; a warning before memory or disk run out.

GPU numbers come from NVML through torch, which needs the package nvidia-ml-py; without it there are none.
"""

import logging
import os
import shutil
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Self

import torch

from whetstone.run.checkpoint_folder import named_checkpoints
from whetstone.run.host import available_memory, tree_memory

SAMPLE_S = 1.0  # between two readings of the GPU
MIN_STEPS = 20  # before the growth of memory is judged
WINDOW = 40  # steps that it is judged by
HORIZON = 50  # steps that the memory must last for
MIN_DISK = 2_000_000_000
GB = 1e9

logger = logging.getLogger("whetstone")


class ResourceMonitor:
    """`metrics(step)` once a step; warns once about memory and once about the disk.

    Only the first rank has numbers: those of its GPU and its host.
    """

    def __init__(self, folder: Path, device: torch.device, *, is_main: bool = True) -> None:
        self._folder, self._is_main = folder, is_main
        self._gpu = GpuSampler(device)
        self._root = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()  # torchrun's ranks
        self._first: int | None = None
        self._series: deque[tuple[int, int]] = deque(maxlen=WINDOW)  # (step, bytes)
        self._checkpoint_size: tuple[Path, int] | None = None  # of the newest one
        self._warned: set[str] = set()

    def __enter__(self) -> Self:
        if self._is_main:
            self._gpu.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._gpu.stop()

    def metrics(self, step: int) -> dict[str, float]:
        """The row of a step that is done."""
        if not self._is_main:
            return {}
        row = self._gpu.metrics()
        used = tree_memory(self._root)
        if used is not None:
            self._first = used if self._first is None else self._first
            self._series.append((step, used))
            row |= {"host/memory_gb": used / GB, "host/memory_growth_gb": (used - self._first) / GB}
            self._warn("memory", memory_warning([*self._series], available_memory()))
        try:
            free = shutil.disk_usage(self._folder).free
        except OSError:  # the folder is gone: the next write there raises
            return row
        row["host/disk_free_gb"] = free / GB
        self._warn("disk", disk_warning(free, self._newest_checkpoint(), self._folder))
        return row

    def _warn(self, kind: str, text: str | None) -> None:
        if text is not None and kind not in self._warned:
            self._warned.add(kind)
            logger.warning(text)

    def _newest_checkpoint(self) -> int:
        """Bytes of the newest checkpoint; 0 before the first."""
        newest = next(iter(named_checkpoints(self._folder)), None)
        if newest is None:
            return 0
        if self._checkpoint_size is None or self._checkpoint_size[0] != newest:
            self._checkpoint_size = (newest, folder_size(newest))
        return self._checkpoint_size[1]


def memory_warning(series: Sequence[tuple[int, int]], available: int | None) -> str | None:
    """A warning where host memory would run out within `HORIZON` steps; `series`: (step, bytes)."""
    if available is None or len(series) < MIN_STEPS:
        return None
    growth = growth_per_step(series)
    if growth * HORIZON <= available:
        return None
    return (
        f"Host memory grows by {growth / GB:.2g} GB a step and {available / GB:.2g} GB are free, so it runs "
        f"out in about {available / growth:.0f} steps: look for a leak in your own reward functions, and set "
        f"save_steps to {HORIZON // 5} or less, so that auto_resume=true continues from a checkpoint."
    )


def growth_per_step(series: Sequence[tuple[int, int]]) -> float:
    """The smaller slope of the two halves of a series: a single jump, as of an evaluation, is no growth."""
    middle = len(series) // 2
    return min(_slope(series[:middle]), _slope(series[middle:]))


def _slope(series: Sequence[tuple[int, int]]) -> float:
    """The slope of the least-squares line."""
    mean = fmean(step for step, _ in series)
    spread = sum((step - mean) ** 2 for step, _ in series)
    return sum((step - mean) * value for step, value in series) / spread if spread else 0.0


def disk_warning(free: int, checkpoint: int, folder: Path) -> str | None:
    """A warning where fewer than two checkpoints of that size, or `MIN_DISK`, are left."""
    if free >= max(2 * checkpoint, MIN_DISK):
        return None
    size = f", and a checkpoint takes {checkpoint / GB:.2g} GB" if checkpoint else ""
    return (
        f"The disk of {folder} has {free / GB:.2g} GB left{size}: free some space, or set save_total_limit=1 "
        "or a larger save_steps."
    )


def folder_size(folder: Path) -> int:
    """Bytes of the files in a folder; files that are deleted meanwhile count nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


class GpuSampler:
    """Reads utilization and memory of a GPU in a thread; does nothing where NVML can't be read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._samples: list[tuple[float, float]] = []  # (percent busy, bytes) since the last `metrics`
        self._over = threading.Event()

    def start(self) -> None:
        if self._device.type != "cuda":
            return
        if (sample := self._read()) is None:
            logger.info("The GPU's utilization can't be read (pip install nvidia-ml-py): no metrics gpu/*.")
        else:
            self._samples.append(sample)
            threading.Thread(target=self._work, name="gpu-sampler", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def metrics(self) -> dict[str, float]:
        """Mean utilization and peak memory since the last call; empty where nothing was read."""
        with self._lock:
            samples, self._samples = self._samples, self._samples[-1:]  # a short step may have no other
        if not samples:
            return {}
        busy, used = zip(*samples, strict=True)
        return {"gpu/utilization_ratio": fmean(busy) / 100, "gpu/memory_used_gb": max(used) / GB}

    def _work(self) -> None:
        while not self._over.wait(SAMPLE_S):
            sample = self._read()
            if sample is None:
                return
            with self._lock:
                self._samples.append(sample)

    def _read(self) -> tuple[float, float] | None:
        """NVML only: a CUDA call could disturb the capture of a graph in another thread."""
        try:
            return torch.cuda.utilization(self._device), torch.cuda.device_memory_used(self._device)
        except Exception:  # no nvidia-ml-py, no permission, a GPU in parts: a metric is not worth an error
            return None
