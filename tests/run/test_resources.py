"""Metrics of GPU, host memory and disk; the warnings before memory or disk run out, on hand-made series."""

import logging
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.waiting import wait_until
from whetstone.run import host, resources
from whetstone.run.resources import (
    GpuSampler,
    ResourceMonitor,
    disk_warning,
    folder_size,
    growth_per_step,
    memory_warning,
)

CPU = torch.device("cpu")
GB = 10**9


def linear(num_steps: int, per_step: int) -> list[tuple[int, int]]:
    return [(step, 5 * GB + step * per_step) for step in range(1, num_steps + 1)]


def test_growth_is_the_slope_of_a_leak_and_none_of_a_jump() -> None:
    assert growth_per_step(linear(20, GB)) == pytest.approx(GB)
    assert growth_per_step([(2 * step, value) for step, value in linear(20, GB)]) == pytest.approx(GB / 2)
    for jump in (3, 10, 17):  # an evaluation, a compilation: once
        assert growth_per_step([(step, GB * (step > jump)) for step in range(1, 21)]) == 0
    stairs = [(step, step // 5 * 5 * GB) for step in range(1, 41)]  # every fifth step
    assert growth_per_step(stairs) == pytest.approx(GB, rel=0.05)
    assert growth_per_step(linear(20, -GB)) < 0


def test_memory_warns_within_fifty_steps_and_after_twenty() -> None:
    assert memory_warning(linear(19, GB), GB) is None
    assert memory_warning(linear(20, GB), None) is None
    assert memory_warning(linear(20, GB), 50 * GB + 1000) is None
    assert memory_warning(linear(20, 0), 0) is None
    text = memory_warning(linear(20, GB), 40 * GB)
    assert text is not None and "about 40 steps" in text and "save_steps" in text


def test_disk_warns_below_two_checkpoints_or_two_gigabytes() -> None:
    folder = Path("runs/a")
    assert disk_warning(2 * GB, 0, folder) is None
    assert disk_warning(2 * GB - 1, 0, folder) is not None
    assert disk_warning(10 * GB, 5 * GB, folder) is None
    text = disk_warning(10 * GB - 1, 5 * GB, folder)
    assert text is not None and "save_total_limit" in text and "5 GB" in text


def test_a_run_is_warned_once_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / "model").write_bytes(b"x" * 3000)
    used, free = iter(range(GB, 100 * GB, GB)), SimpleNamespace(free=10 * GB)
    monkeypatch.setattr(resources, "tree_memory", lambda root: next(used))
    monkeypatch.setattr(resources, "available_memory", lambda: 20 * GB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    monitor = ResourceMonitor(tmp_path, CPU)
    monkeypatch.setattr(logging.getLogger("whetstone"), "propagate", True)
    with monitor, caplog.at_level(logging.WARNING, "whetstone"):
        rows = [monitor.metrics(step) for step in range(1, 20)]
        assert caplog.records == []
        rows += [monitor.metrics(step) for step in range(20, 30)]
        assert len(caplog.records) == 1 and "Host memory" in caplog.text
        free.free = GB
        rows += [monitor.metrics(step) for step in range(30, 32)]
    assert len(caplog.records) == 2 and "save_total_limit" in caplog.text
    assert rows[0] == {"host/memory_gb": 1.0, "host/memory_growth_gb": 0.0, "host/disk_free_gb": 10.0}
    assert rows[-1]["host/memory_growth_gb"] == 30.0 and rows[-1]["host/disk_free_gb"] == 1.0
    assert folder_size(tmp_path) == 3000


def test_what_can_not_be_read_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "PROC", tmp_path / "nothing")
    assert host.tree_memory() is None and host.available_memory() is None
    with ResourceMonitor(tmp_path / "away", CPU) as monitor:
        assert monitor.metrics(1) == {}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_of_a_process_tree() -> None:
    before = host.tree_memory()
    assert before is not None and before > 50_000_000  # torch is loaded
    with mmap.mmap(-1, 100_000_000) as pages:
        pages.write(b"1" * 100_000_000)
        assert 90_000_000 < (host.tree_memory() or 0) - before < 150_000_000
    code = "import sys; x = b'1' * 100_000_000; print('up', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        assert 90_000_000 < (host.tree_memory() or 0) - before < 180_000_000
        assert (host.tree_memory(child.pid) or 0) < (host.tree_memory(os.getpid()) or 0)
        child.communicate("")


def test_a_gpu_is_sampled_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    busy: list[int] = []

    def utilization(device: torch.device) -> int:
        busy.append(min(40 * len(busy), 100))
        return busy[-1]

    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda device: 3 * GB)
    monkeypatch.setattr(resources, "SAMPLE_S", 0.01)
    sampler = GpuSampler(torch.device("cuda"))
    assert sampler.metrics() == {}
    sampler.start()
    wait_until(lambda: len(busy) > 3)
    row = sampler.metrics()
    sampler.stop()
    assert row["gpu/memory_used_gb"] == 3.0 and 0.4 <= row["gpu/utilization_ratio"] <= 1.0
    assert sampler.metrics()["gpu/memory_used_gb"] == 3.0  # the last sample, for a step without a new one


def test_without_nvml_there_are_no_numbers_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> int:
        raise ModuleNotFoundError("nvidia-ml-py")

    monkeypatch.setattr(torch.cuda, "utilization", fail)
    sampler = GpuSampler(torch.device("cuda"))
    sampler.start()
    assert sampler.metrics() == {}
