"""Two ranks on one GPU over NCCL: each keeps to its share of the memory, and a run is that of one process."""

import os

import pytest
import torch

from tests.distributed.launch import run_on
from tests.support.launch import Launched
from tests.support.runs import rows, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def _rank():
    import torch.distributed as dist

    from whetstone.config.sections import ParallelConfig
    from whetstone.model.memory import free_memory, usable_memory
    from whetstone.parallel import mesh
    from whetstone.parallel.local_ranks import SHARE_GPU

    os.environ[SHARE_GPU] = "1"
    device = torch.device("cuda")
    with mesh.start(ParallelConfig(), "cuda") as ranks:
        summed = torch.full((1 << 20,), float(ranks.rank + 1), device=device)
        dist.all_reduce(summed)
        free, total = torch.cuda.mem_get_info()
        memory = (usable_memory(device), free_memory(device), free, total)
        dist.barrier()
        return dist.get_backend_config(), summed[0].item(), summed.device.index, memory


def test_collectives_are_nccl_and_memory_is_divided():
    for backend, summed, index, (usable, free, unused, total) in run_on(2, _rank):
        assert ("cuda:nccl" in backend, summed, index) == (True, 3.0, 0)
        assert 0.3 * unused < usable < 0.46 * total
        assert free <= usable


def test_a_run_of_two_ranks_equals_one_process(tmp_path):
    settings = {"max_steps": 3, "save_strategy": "no", "micro_batch_tokens": "auto"}
    (tmp_path / "two").mkdir()
    with Launched(tmp_path / "two", ["--ranks", "2", "--share-gpu"], **settings) as launched:
        assert launched.end(300) == 0, launched.said
    run(tmp_path / "one", **settings)
    log = (tmp_path / "two" / "run" / "training.log").read_text()
    assert log.count("All ranks share one GPU (WHETSTONE_SHARE_GPU): for tests and development") == 1
    for mine, theirs in zip(rows(tmp_path / "two", "train"), rows(tmp_path / "one", "train"), strict=True):
        for key in ("reward", "loss", "grad_norm"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5), key
