"""The batches of a rank, and differences between tensors."""

import os
from typing import Any

import torch

from whetstone.parallel.mesh import Ranks
from whetstone.update.packing import Batch, balance, bin_pack, empty_micro_batch, pack_sequences

CPU = torch.device("cpu")
# Where the ranks of whole runs are: "cuda" has all of them on one GPU (make test-ranks).
DEVICE = torch.device(os.environ.get("WHETSTONE_TEST_DEVICE", "cpu"))


def my_batches(samples: list[Any], ranks: Ranks, max_tokens: int = 30) -> list[Batch]:
    bins = [bin_pack(share, max_tokens) for share in balance(samples, ranks.data_size)]
    mine = [pack_sequences(one) for one in bins[ranks.data_rank]]
    return mine + [empty_micro_batch(samples[0])] * (max(len(one) for one in bins) - len(mine))


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).norm() / one.norm().clamp(min=1e-12)).item()
