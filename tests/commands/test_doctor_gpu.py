"""`whet doctor` on machines with GPUs, simulated by what torch, the driver and the OS report."""

import importlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.doctor import GB, FakeGpus, by_name, config_of
from whetstone.commands.doctor import gpu, nvidia
from whetstone.commands.doctor.check import Check


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((8, 0), ["sm_80"], True),
        ((8, 6), ["sm_80"], True),  # a higher minor of the same major
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_80", "sm_86"], False),  # a binary does not run on another major
        ((9, 0), ["sm_80", "compute_80"], True),  # PTX runs on anything newer
        ((7, 0), ["sm_80", "compute_80"], False),
        ((12, 0), ["sm_90", "sm_100"], False),
        ((12, 0), ["sm_90", "sm_120"], True),
        ((9, 0), ["sm_90a"], True),
        ((10, 0), ["compute_90a"], False),  # of that GPU alone
        ((10, 3), ["sm_100f"], True),
        ((9, 4), ["gfx942"], True),  # ROCm: not judged
    ],
)
def test_which_builds_run_on_which_gpu(
    capability: tuple[int, int], architectures: list[str], runs: bool
) -> None:
    assert gpu.has_kernels(capability, architectures) == runs


def test_a_gpu_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpus(monkeypatch, (9, 0))
    checks = by_name(gpu.check_gpus(None))
    expected = ["driver", "CUDA", "GPU 0", "GPU 0 memory", "bf16", "Triton", "C compiler", "Python headers"]
    assert list(checks) == expected
    assert {check.status for check in checks.values()} == {"ok"}
    assert gpu.check_gpus(config_of("device=cpu")) == []
    assert "bf16" not in by_name(gpu.check_gpus(config_of("bf16=false")))


def test_no_kernel_image(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeGpus(monkeypatch, (12, 0))
    fake.architectures = ["sm_80", "sm_90"]
    check = by_name(gpu.check_gpus(None))["GPU 0"]
    assert check.status == "problem" and "newest CUDA" in check.remedy
    FakeGpus(monkeypatch, (7, 0))
    check = by_name(gpu.check_gpus(None))["GPU 0"]
    assert check.status == "problem" and "CUDA 12.6" in check.remedy


def test_a_kernel_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpus(monkeypatch, (9, 0))
    monkeypatch.setattr(gpu, "try_kernel", lambda number: "CUDA error: device busy")
    assert by_name(gpu.check_gpus(None))["GPU 0"].status == "problem"

    def fail(number: int) -> None:
        raise RuntimeError("CUDA unknown error\nmore")

    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    (check,) = gpu.check_gpus(None)
    assert check.name == "GPU" and check.status == "problem" and "more" not in check.detail


def test_little_free_memory_and_who_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeGpus(monkeypatch, (9, 0))
    fake.free = 10 * GB
    asked = []

    def smi(*arguments: str) -> str:
        asked.append(arguments)
        return "4711, /usr/bin/python, 71680\n4712, [N/A], [N/A]\n"

    monkeypatch.setattr(nvidia, "nvidia_smi", smi)
    check = by_name(gpu.check_gpus(None))["GPU 0 memory"]
    assert check.status == "warning" and "4711 python 70.0 GB" in check.detail
    assert asked[-1][:2] == ("-i", "GPU-1")
    fake.free = GB // 2
    assert by_name(gpu.check_gpus(None))["GPU 0 memory"].status == "problem"


def test_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeGpus(monkeypatch, (7, 5), (8, 0))
    fake.architectures = ["sm_75", "sm_80"]
    check = by_name(gpu.check_gpus(None))["bf16"]
    assert check.status == "warning" and "GPU 0" in check.detail and "GPU 1" not in check.detail
    assert by_name(gpu.check_gpus(config_of("bf16=true")))["bf16"].status == "problem"


def test_triton_and_what_it_compiles_with(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def refuse(name: str, *rest: Any) -> Any:
        if name == "triton":
            raise ImportError("undefined symbol")
        return real(name, *rest)

    monkeypatch.setattr(gpu.importlib, "import_module", refuse)
    headers = gpu._headers
    FakeGpus(monkeypatch)
    assert by_name(gpu.check_gpus(None))["Triton"].status == "ok"  # a CPU needs none
    FakeGpus(monkeypatch, (9, 0))
    assert by_name(gpu.check_gpus(None))["Triton"].status == "problem"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert by_name(gpu.check_gpus(None))["C compiler"].status == "problem"
    (check,) = gpu.check_gpus(config_of("device=cpu", "torch_compile=true"))
    assert check.name == "C compiler" and check.status == "problem"
    monkeypatch.setattr(shutil, "which", lambda name: f"/opt/{name}")
    monkeypatch.setenv("CC", "mycc")
    assert by_name(gpu.check_gpus(None))["C compiler"].detail == "/opt/mycc"
    monkeypatch.setattr(gpu.sysconfig, "get_path", lambda name: "/nowhere")
    assert headers().status == "problem"


def test_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.cuda import nccl

    FakeGpus(monkeypatch, (9, 0), (9, 0))
    monkeypatch.setattr(nccl, "version", lambda: (2, 27, 5))
    assert by_name(gpu.check_gpus(None))["NCCL"].detail == "2.27.5"

    def fail() -> None:
        raise AttributeError("_nccl_version")

    monkeypatch.setattr(nccl, "version", fail)
    assert by_name(gpu.check_gpus(None))["NCCL"].status == "warning"
    assert by_name(gpu.check_gpus(config_of("tp_size=2")))["NCCL"].status == "problem"


def test_gpus_for_ranks_and_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpus(monkeypatch, (9, 0), (9, 0))

    def status(*settings: str) -> str | None:
        checks = by_name(gpu.check_gpus(config_of(*settings)))
        return next((check.status for name, check in checks.items() if name.startswith("GPUs for")), None)

    assert status() is None
    assert status("tp_size=2") == "ok"
    assert status("tp_size=4") == "problem"
    assert status("ddp_size=4") == "warning"  # may be on other hosts
    servers = ("rollout_engine=vllm",)
    assert status(*servers, "server_devices=[1]") == "ok"
    assert status(*servers, "server_devices=[2]") == "problem"
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert status("ddp_size=4") == "problem"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert status("ddp_size=4") == "ok"
    assert status("ddp_size=3") == "problem"  # does not divide 8


def test_a_gpu_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    def line(must: bool = False) -> Check:
        (check,) = gpu.check_gpus(config_of(*(["device=cuda"] if must else [])))
        return check

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    FakeGpus(monkeypatch)
    assert line().status == "warning" and line(must=True).remedy == "set device=cpu"
    monkeypatch.setattr(nvidia, "present_gpus", lambda: ["NVIDIA H100"])
    assert line().name == "GPU" and "--gpus all" in line().remedy
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES" in line().remedy
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert line().name == "driver" and "580" in line().remedy and line(must=True).status == "problem"
    monkeypatch.setattr(nvidia, "driver_version", lambda: None)
    assert line().name == "driver" and "no NVIDIA driver" in line().detail
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    assert line().name == "CUDA" and "torch==2.13.0," in line().remedy and "pip install" in line().remedy
    assert line(must=True).status == "problem"


def test_what_the_driver_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver, pci = tmp_path / "nvidia", tmp_path / "pci"
    monkeypatch.setattr(nvidia, "DRIVER_FOLDER", driver)
    monkeypatch.setattr(nvidia, "PCI_DEVICES", pci)
    monkeypatch.setattr(nvidia.shutil, "which", lambda name: None)
    assert nvidia.present_gpus() == [] and nvidia.driver_version() is None
    for name, vendor, kind in (
        ("a", "0x10de", "0x030200"),
        ("b", "0x10de", "0x040300"),
        ("c", "0x8086", "0x03"),
    ):
        (pci / name).mkdir(parents=True)
        (pci / name / "vendor").write_text(f"{vendor}\n")
        (pci / name / "class").write_text(f"{kind}\n")
    assert nvidia.present_gpus() == ["NVIDIA GPU"]  # the others are a sound card and another maker's
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\n[ "$1" = -L ] && echo "GPU 0: NVIDIA L4 (UUID: GPU-12)" || echo "550.54.15"\n')
    smi.chmod(0o755)
    monkeypatch.setattr(nvidia.shutil, "which", lambda name: str(smi))
    assert nvidia.present_gpus() == ["NVIDIA L4"] and nvidia.driver_version() == "550.54.15"
    (driver / "gpus" / "0000:01").mkdir(parents=True)
    (driver / "gpus" / "0000:01" / "information").write_text("Model: \t\t NVIDIA H100\nIRQ: 1\n")
    text = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version: 12\n"
    )
    (driver / "version").write_text(text)
    assert nvidia.present_gpus() == ["NVIDIA H100"] and nvidia.driver_version() == "570.86.15"
