"""Weights over NCCL from one and two training ranks to a vLLM server on the same GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm.test_vllm import BASE, LEARN, ROOT, Served

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a GPU"),
]
# Trainer and server share a GPU, which NCCL allows on different hosts only (parallel/local_ranks.py).
SHARED = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
SETTINGS = ["device=cuda", "weight_transfer=nccl", "server_gpu_memory_utilization=0.3"]
STEPS = 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SHARED.items():
            patch.setenv(name, value)
        served = Served(tmp_path_factory.mktemp("served"), *SETTINGS)
        yield served
        served.stop()


def trained(server: Served, folder: Path, num_ranks: int, transfer: str) -> list[dict[str, Any]]:
    """The rows of a run of STEPS steps; its weights reach the server by `transfer`."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}", "-m"]
    words = [*BASE, *LEARN, *SETTINGS, f"weight_transfer={transfer}", f"max_steps={STEPS}"]
    words += [f"rollout_servers={server.url}", f"output_dir={folder}", "log_completions_steps=1"]
    words += ["eval_num_samples=0"]
    command = [sys.executable, "-m", *(launcher if num_ranks > 1 else []), "whetstone", "train", "quickstart"]
    environment = {**os.environ, **SHARED, "NCCL_HOSTID": "trainer", "PYTHONPATH": str(ROOT)}
    environment |= {"WHETSTONE_SHARE_GPU": "1"}
    done = subprocess.run([*command, *words], env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "train"]


def texts(folder: Path) -> list[str]:
    files = [folder / "run" / "completions" / f"step_{step}.jsonl" for step in range(1, STEPS + 1)]
    return [json.loads(line)["completion"] for file in files for line in file.read_text().splitlines()]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_nccl_gives_the_weights_that_files_give(server: Served, tmp_path: Path, num_ranks: int) -> None:
    by_nccl = trained(server, tmp_path / "nccl", num_ranks, "nccl")
    by_file = trained(server, tmp_path / "disk", 1, "disk")
    for row in by_nccl:
        assert row["sampling/sampling_logp_difference/mean"] < 1e-3
        assert row["staleness"] == 0
    pairs = list(zip(texts(tmp_path / "nccl"), texts(tmp_path / "disk"), strict=True))
    same = sum(one == other for one, other in pairs) / len(pairs)
    print(f"{num_ranks} ranks: {same:.1%} of {len(pairs)} completions are the same")
    assert same > 0.9  # vLLM's own samples depend on what shares their batch, now and then
    assert by_nccl[-1]["reward"] == pytest.approx(by_file[-1]["reward"], abs=0.1)
