"""GPUs as torch would report them, for the tests of `whet doctor`."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from whetstone.commands.doctor import gpu, nvidia
from whetstone.commands.doctor.check import Check
from whetstone.config import load

GB = 2**30


def config_of(*settings: str) -> Any:
    return load("quickstart", settings).config


def by_name(checks: Any) -> dict[str, Check]:
    return {check.name: check for check in checks}


class FakeGpus:
    """GPUs as torch reports them: capabilities, the architectures of the build, free memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
        self.free = 79 * GB
        self.architectures = ["sm_80", "sm_90", "compute_90"]
        shapes = [
            SimpleNamespace(name="NVIDIA X", major=a, minor=b, total_memory=80 * GB, uuid="GPU-1")
            for a, b in capabilities
        ]
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "is_available", lambda: bool(shapes))
        monkeypatch.setattr(cuda, "device_count", lambda: len(shapes))
        monkeypatch.setattr(cuda, "get_device_properties", lambda number: shapes[number])
        monkeypatch.setattr(cuda, "get_arch_list", lambda: self.architectures)
        monkeypatch.setattr(cuda, "mem_get_info", lambda number: (self.free, 80 * GB))
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        monkeypatch.setattr(gpu, "try_kernel", lambda number: None)
        monkeypatch.setattr(nvidia, "driver_version", lambda: "570.86.15")
        monkeypatch.setattr(nvidia, "driver_cuda", lambda: (12, 8))
        monkeypatch.setattr(nvidia, "present_gpus", lambda: ["NVIDIA X"] * len(shapes))
        monkeypatch.setattr(gpu, "_headers", lambda: Check("GPU", "Python headers", "ok", "here"))
