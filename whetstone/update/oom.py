"""Memory that runs out in mid-run: a piece of work that may be begun again in halves, and the sentence that
ends the run where it may not.

Knows no models. That a rank ends ends the others, with its sentence (parallel/watch.py).
"""

from collections.abc import Callable
from typing import TypeVar

import torch

from whetstone.errors import UserError
from whetstone.parallel.mesh import Ranks

T = TypeVar("T")


def while_memory_lasts(work: Callable[[], T], less: Callable[[], bool]) -> T:
    """`work()`, begun again after `less()` whenever memory runs out, until `less` says that it can't be
    less.
    """
    while True:
        try:
            return work()
        except torch.OutOfMemoryError as error:
            reason = str(error)
        # Outside the handler: the exception holds everything that was on its way.
        if not less():
            raise torch.OutOfMemoryError(reason)


def halve(pieces: list[T], halves: Callable[[T], list[T]]) -> bool:
    """Put the halves of each piece in its place; whether there was anything to halve."""
    whole = len(pieces)
    pieces[:] = [half for piece in pieces for half in halves(piece)]
    return len(pieces) > whole


def too_little(error: torch.OutOfMemoryError, ranks: Ranks, tokens: int) -> UserError:
    """What to change, and whose memory ran out with micro-batches of `tokens`; 0: not known yet."""
    whose = "The GPU's memory" if ranks.world_size == 1 else f"The memory of rank {ranks.rank}'s GPU"
    reason = str(error).splitlines()[0].rstrip(".")
    was = f" (it was {tokens:,})" if tokens else ""
    return UserError(
        f"{whose} ran out in the update ({reason}): set micro_batch_tokens lower{was}, "
        "gradient_checkpointing=true, optim=adamw_8bit or cpu_offload=optimizer."
    )
