"""Out-of-memory handling: retry with half-size micro-batches, or a UserError with the remedy."""

from collections.abc import Callable
from typing import TypeVar

import torch

from whetstone.errors import first_line
from whetstone.parallel.mesh import Ranks

T = TypeVar("T")


def retry_on_oom(work: Callable[[], T], reduce: Callable[[], bool]) -> T:
    """`work()`, repeated after `reduce()` on out of memory, until `reduce` returns False."""
    while True:
        try:
            return work()
        except torch.OutOfMemoryError as error:
            reason = str(error)
        # Outside the handler: the exception holds references to the tensors of the failed pass.
        if not reduce():
            raise torch.OutOfMemoryError(reason)


def split_all(items: list[T], split: Callable[[T], list[T]]) -> bool:
    """Replace each item by its parts, in place; whether any item could be split."""
    before = len(items)
    items[:] = [part for item in items for part in split(item)]
    return len(items) > before


def explain_oom(error: Exception, ranks: Ranks, tokens: int) -> str | None:
    """What to change; `tokens` is the micro-batch size that failed (0: not known yet)."""
    if not isinstance(error, torch.OutOfMemoryError):
        return None
    whose = "The GPU's memory" if ranks.world_size == 1 else f"The memory of rank {ranks.rank}'s GPU"
    current = f" (it was {tokens:,})" if tokens else ""
    return (
        f"{whose} ran out in the update ({first_line(error)}): set micro_batch_tokens lower{current}, "
        "gradient_checkpointing=true, optim=adamw_8bit or cpu_offload=optimizer."
    )
