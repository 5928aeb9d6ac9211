"""The device mesh, replicate x shard x tp, and this process's rank on each axis.

A launcher (torchrun, Ray, Slurm) sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
"""

import contextlib
import datetime
import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from whetstone.config.accelerate import check_launcher
from whetstone.config.sections import ParallelConfig
from whetstone.errors import UserError
from whetstone.parallel.local_ranks import SHARE_GPU, share_gpu, shares_gpu


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process and its rank on each axis. Ranks that differ only in `tp_rank` have the same tokens."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    data_rank: int = 0  # which share of the problems and tokens is ours
    data_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    mesh: DeviceMesh | None = None  # replicate x shard x tp; None: alone

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and writes files."""
        return self.rank == 0

    @property
    def is_first_of_tp(self) -> bool:
        """Whether this is the first of the ranks that work on the same tokens."""
        return self.tp_rank == 0

    @property
    def layout(self) -> str:
        """How many ranks there are on each axis: what a rank's memory depends on."""
        return "1x1x1" if self.mesh is None else "x".join(str(size) for size in self.mesh.shape)

    @property
    def sharding(self) -> DeviceMesh:
        """The axes that weights are sharded over, and repeated over where there are replicas."""
        assert self.mesh is not None
        return self.mesh["replicate", "shard"] if self.mesh.size(0) > 1 else self.mesh["shard"]

    @property
    def tp(self) -> DeviceMesh:
        assert self.mesh is not None
        return self.mesh["tp"]


SINGLE = Ranks()


def is_launched() -> bool:
    """Whether a launcher started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def restarts() -> int:
    """How often torchrun has started this run anew after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@contextlib.contextmanager
def start(config: ParallelConfig, device_type: str) -> Iterator[Ranks]:
    """Join the other ranks of the launch; `SINGLE` where there are none."""
    # FSDP offloads weights to the CPU, on one GPU as well.
    is_single = not is_launched() and (config.cpu_offload != "all" or device_type != "cuda")
    if is_single:
        check_launcher(os.environ)
    check_sizes(config, int(os.environ.get("WORLD_SIZE", "1")))
    if is_single:
        yield SINGLE
        return
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device_type == "cuda" and is_launched() and shares_gpu():
        share_gpu()
    elif device_type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"This host has {torch.cuda.device_count()} GPUs, and the launcher started a rank for number "
                f"{local_rank + 1}: set --nproc_per_node to the number of GPUs, or {SHARE_GPU}=1 to test "
                "several ranks on one."
            )
        torch.cuda.set_device(local_rank)
    timeout = datetime.timedelta(seconds=config.collective_timeout_s)
    store, rank, world_size = dist.HashStore(), 0, 1  # pyright: ignore[reportPrivateImportUsage]
    if is_launched():
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    # torchrun's store lives on after a restart, with the addresses of the ranks that are gone.
    store = dist.PrefixStore(f"attempt/{restarts()}", store)  # pyright: ignore[reportPrivateImportUsage]
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)
    # Warnings of torch that do not concern a user; the view is never changed in place.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="To construct DTensor from torch.Tensor")
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    try:
        yield make_ranks(config, device_type, local_rank)
    finally:
        dist.destroy_process_group()


def make_ranks(config: ParallelConfig, device_type: str, local_rank: int = 0) -> Ranks:
    """The mesh over a process group that exists."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    shards = world_size // (config.ddp_size * config.tp_size)
    mesh = init_device_mesh(
        device_type, (config.ddp_size, shards, config.tp_size), mesh_dim_names=("replicate", "shard", "tp")
    )
    return Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        data_rank=rank // config.tp_size,
        data_size=world_size // config.tp_size,
        tp_rank=rank % config.tp_size,
        tp_size=config.tp_size,
        mesh=mesh,
    )


def check_sizes(config: ParallelConfig, world_size: int) -> None:
    """Refuse sizes that do not divide the ranks there are, with the remedy."""
    sizes = config.ddp_size * config.tp_size
    if world_size % sizes:
        raise UserError(
            f"tp_size {config.tp_size} x ddp_size {config.ddp_size} = {sizes} does not divide the number of "
            f"ranks, {world_size}: change one, or start `torchrun --nproc_per_node={sizes} -m whetstone "
            "train ...`."
        )
