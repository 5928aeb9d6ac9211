"""Collectives over ranks; the identity in a single process. All ranks call the same ones in the same order.

`_data` means data ranks: of tensor-parallel ranks, which work on the same tokens, only the first counts.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from whetstone.errors import UserError
from whetstone.parallel.mesh import Ranks

T = TypeVar("T")


def all_reduce_data(ranks: Ranks, tensor: Tensor) -> Tensor:
    """The sum over data ranks, bit-equal on every rank."""
    return all_reduce_ranks(ranks, tensor if ranks.is_first_of_tp else torch.zeros_like(tensor))


def all_reduce_ranks(ranks: Ranks, tensor: Tensor) -> Tensor:
    """The sum over all ranks, tensor-parallel ones included."""
    if ranks.world_size == 1:
        return tensor
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def all_gather_data(ranks: Ranks, tensor: Tensor) -> list[Tensor]:
    """The tensors [n] of all data ranks in their order, of differing lengths."""
    if ranks.world_size == 1:
        return [tensor]
    sizes = torch.zeros(ranks.data_size, dtype=torch.long, device=tensor.device)
    sizes[ranks.data_rank] = len(tensor)
    lengths = all_reduce_data(ranks, sizes).tolist()
    # A sum in which the other ranks have zeros: exact, for any lengths.
    together = tensor.new_zeros(sum(lengths))
    begin = sum(lengths[: ranks.data_rank])
    together[begin : begin + len(tensor)] = tensor
    return list(all_reduce_data(ranks, together).split(lengths))


def new_gloo_group(ranks: Ranks, timeout_s: float) -> Any:
    """A second group of all ranks, for collectives of a thread beside the main one. A collective call."""
    if ranks.world_size == 1:
        return None
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))


def all_gather_data_objects(ranks: Ranks, local: T, group: Any = None) -> list[T]:
    """The objects of all data ranks, in order. `group`: a `new_gloo_group`, for a thread."""
    gathered: list[Any] = all_gather_objects(ranks, local if ranks.is_first_of_tp else None, group)
    return gathered[:: ranks.tp_size]


def all_gather_objects(ranks: Ranks, local: T, group: Any = None) -> list[T]:
    """The objects of all ranks, tensor-parallel ones included."""
    if ranks.world_size == 1:
        return [local]
    gathered: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(gathered, local, group=group)
    return gathered


def broadcast_from_main(ranks: Ranks, local: T) -> T:
    """The object of the first rank."""
    if ranks.world_size == 1:
        return local
    box: list[Any] = [local if ranks.is_main else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def broadcast_in_tp(ranks: Ranks, local: T) -> T:
    """The object of the first of the ranks that work on the same tokens."""
    if ranks.tp_size == 1:
        return local
    box: list[Any] = [local if ranks.is_first_of_tp else None]
    dist.broadcast_object_list(box, group=ranks.tp.get_group(), group_src=0)
    return box[0]


def min_over_ranks(ranks: Ranks, local: float) -> float:
    """The minimum over all ranks."""
    if ranks.world_size == 1:
        return local
    minimum = torch.tensor(local, dtype=torch.float64)
    dist.all_reduce(minimum, op=dist.ReduceOp.MIN)
    return minimum.item()


def barrier(ranks: Ranks) -> None:
    if ranks.world_size > 1:
        dist.barrier()


def run_on_main(ranks: Ranks, work: Callable[[], T], *, to_all: bool = False) -> T | None:
    """Run `work` on the first rank; its UserError is raised on all ranks, its result returned `to_all`."""
    result, failure = None, None
    if ranks.is_main:
        try:
            result = work()
        except UserError as error:
            failure = str(error)
    shared, failure = broadcast_from_main(ranks, (result if to_all else None, failure))
    if failure is not None:
        raise UserError(failure)
    return shared if to_all else result
