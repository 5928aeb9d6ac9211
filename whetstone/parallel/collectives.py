"""What the ranks tell each other: sums, gathered tensors, gathered objects, a common decision.

Every function takes `Ranks` and is the identity for a process alone. All ranks must call the same ones in the
same order. Sums and gathers go over data ranks: of those that work on the same tokens only the first counts.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from whetstone.errors import UserError
from whetstone.parallel.mesh import Ranks

T = TypeVar("T")


def sum_of_data(ranks: Ranks, tensor: Tensor) -> Tensor:
    """The sum over data ranks; every rank gets the same bits."""
    if ranks.world_size == 1:
        return tensor
    total = tensor.clone() if ranks.is_first_of_tp else torch.zeros_like(tensor)
    dist.all_reduce(total)
    return total


def sum_of_all(ranks: Ranks, tensor: Tensor) -> Tensor:
    """The sum over all ranks, tensor-parallel ones counted one by one."""
    if ranks.world_size == 1:
        return tensor
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def gather_of_data(ranks: Ranks, tensor: Tensor) -> list[Tensor]:
    """The tensors [n] of all data ranks in their order, of differing lengths."""
    if ranks.world_size == 1:
        return [tensor]
    sizes = torch.zeros(ranks.data_size, dtype=torch.long, device=tensor.device)
    sizes[ranks.data_rank] = len(tensor)
    lengths = sum_of_data(ranks, sizes).tolist()
    # A sum in which everybody else holds zeros: exact, and of any lengths.
    together = tensor.new_zeros(sum(lengths))
    begin = sum(lengths[: ranks.data_rank])
    together[begin : begin + len(tensor)] = tensor
    return list(sum_of_data(ranks, together).split(lengths))


def second_line(ranks: Ranks, timeout_s: float) -> Any:
    """All ranks once more, for a thread that talks to the others while the main one does. All must ask for it
    at the same place.
    """
    if ranks.world_size == 1:
        return None
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))


def gather_objects(ranks: Ranks, mine: T, line: Any = None) -> list[T]:
    """What every data rank has, in their order. `line`: a `second_line`, where a thread asks."""
    if ranks.world_size == 1:
        return [mine]
    everything: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(everything, mine if ranks.is_first_of_tp else None, group=line)
    return everything[:: ranks.tp_size]


def gather_from_all(ranks: Ranks, mine: T) -> list[T]:
    """What every rank has, tensor-parallel ones too."""
    if ranks.world_size == 1:
        return [mine]
    everything: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(everything, mine)
    return everything


def from_main(ranks: Ranks, mine: T) -> T:
    """What the first rank has."""
    if ranks.world_size == 1:
        return mine
    box: list[Any] = [mine if ranks.is_main else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def any_of(ranks: Ranks, mine: bool) -> bool:
    """Whether any rank says yes: one decision for all of them."""
    return any(gather_from_all(ranks, mine))


def least_of(ranks: Ranks, mine: float) -> float:
    """The smallest number that any rank has."""
    if ranks.world_size == 1:
        return mine
    least = torch.tensor(mine, dtype=torch.float64)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return least.item()


def wait_for_all(ranks: Ranks) -> None:
    if ranks.world_size > 1:
        dist.barrier()


def my_share(ranks: Ranks, items: Sequence[T]) -> list[T]:
    """Every data_size-th item: who comes next in line gets the next one."""
    return list(items[ranks.data_rank :: ranks.data_size])


def main_first(ranks: Ranks, work: Callable[[], T], *, to_all: bool = False) -> T | None:
    """Let the first rank do something that may fail for a reason the user should know: all fail with it then.

    The others get None, or with `to_all` what came out.
    """
    made, failure = None, None
    if ranks.is_main:
        try:
            made = work()
        except UserError as error:
            failure = str(error)
    told = from_main(ranks, (made if to_all else None, failure))
    if told[1] is not None:
        raise UserError(told[1])
    return told[0] if to_all else made
