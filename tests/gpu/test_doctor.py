"""`whet doctor` and the metrics of a run on a real GPU. A machine that trains has no problem."""

import importlib.util
import json

import pytest
import torch

from tests.support.runs import run
from whetstone.commands.doctor import gpu, nvidia
from whetstone.config import load

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def test_a_gpu_that_trains_has_no_problem():
    checks = {check.name: check for check in gpu.check_gpus(load("quickstart", ["device=cuda"]).config)}
    print("\n".join(f"{check.status} {check.name}: {check.detail}" for check in checks.values()))
    assert [check for check in checks.values() if check.status == "problem"] == []
    assert {"driver", "CUDA", "GPU 0", "GPU 0 memory", "Triton", "C compiler"} <= set(checks)
    assert nvidia.driver_version() is not None and len(nvidia.present_gpus()) >= 1
    supported = nvidia.driver_cuda()
    assert supported is not None and supported[0] >= int((torch.version.cuda or "0").split(".")[0])


def test_gpu_metrics_of_a_run(tmp_path):
    run(tmp_path, device="cuda", max_steps=2, eval_num_samples=0, save_strategy="no")
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["host/memory_gb"] > 0.5
    if importlib.util.find_spec("pynvml") is None:
        assert "gpu/memory_used_gb" not in row
    else:
        assert 0 <= row["gpu/utilization_ratio"] <= 1 and row["gpu/memory_used_gb"] > 0.3
