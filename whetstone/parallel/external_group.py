"""A process group with the workers of a rollout server, outside our own world.

torch has no public way to join two groups that were started apart; this is what SGLang and the trainers
around it use (`_new_process_group_helper`).
"""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

TIMEOUT = timedelta(minutes=10)


def join(address: str, port: int, *, rank: int, world_size: int, name: str, backend: str) -> Any:
    """Meet the others at `address`; rank 0 listens there. Returns once all are present."""
    store, rank, world_size = next(rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=TIMEOUT))
    store.set_timeout(TIMEOUT)
    group, _ = distributed_c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        distributed_c10d.Backend(backend),
        distributed_c10d.PrefixStore(name, store),
        group_name=name,  # type: ignore[arg-type]  # a plain text will do
        backend_options=None,
        timeout=TIMEOUT,
    )
    distributed_c10d._world.pg_group_ranks[group] = {number: number for number in range(world_size)}
    return group


def broadcast(tensors: list[Tensor], group: Any) -> None:
    """From rank 0 to everybody, in order."""
    handles = [dist.broadcast(tensor, src=0, group=group, async_op=True) for tensor in tensors]
    for handle in handles:
        assert handle is not None
        handle.wait()


def leave(group: Any) -> None:
    dist.destroy_process_group(group)
