"""What several ranks on one GPU are given. A run of them: tests/gpu/test_shared_gpu.py."""

import os

import pytest
import torch

from whetstone.parallel.local_ranks import share_gpu


def test_each_rank_has_a_host_of_its_own_and_a_share_of_the_free_memory(monkeypatch):
    shares = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (60 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *share: shares.append(share))
    monkeypatch.setattr(os, "environ", {"RANK": "3", "WORLD_SIZE": "4", "NCCL_P2P_DISABLE": "0"})
    share_gpu()
    assert os.environ["NCCL_HOSTID"] == "host3"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert os.environ["NCCL_P2P_DISABLE"] == os.environ["NCCL_SHM_DISABLE"] == "1"
    os.environ |= {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}  # the ranks of this machine count
    share_gpu()
    assert shares == [(pytest.approx(0.9 * 60 / 80 / 4), 0), (pytest.approx(0.9 * 60 / 80 / 2), 0)]
