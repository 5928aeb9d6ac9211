"""The section of several devices and machines. The launcher (torchrun) says how many processes there are."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from whetstone.config.base import MAX_SECONDS, Resume, Section, accept


class ParallelConfig(Section):
    """How the ranks that a launcher started share the work: ddp_size x shards x tp_size of them."""

    resume: ClassVar = Resume.SAFE
    tp_size: int = Field(default=1, ge=1, le=1_024)
    """Tensor-parallel ranks: each layer's matrices are split over so many ranks with the same tokens."""
    ddp_size: int = Field(default=1, ge=1, le=65_536)
    """Replicas of the sharded weights (FSDP2 within each of so many groups); 1: sharded over all ranks."""
    sequence_parallel: bool = False
    """With tp_size: also split norms and activations between layers along the tokens: less memory."""
    cpu_offload: Annotated[Literal["none", "optimizer", "all"], accept({True: "all", False: "none"})] = "none"
    """Keep optimizer state and reference (all: sharded weights too) in CPU memory while unused. GPU only."""
    heartbeat_timeout_s: float = Field(default=30.0, ge=2, le=600)
    """A rank without a heartbeat for so long is declared dead, and all others end with that reason."""
    collective_timeout_s: float = Field(default=1800.0, ge=10, le=MAX_SECONDS)
    """Longest wait of one rank for the others (the slowest rollouts, the loading of a large model)."""
