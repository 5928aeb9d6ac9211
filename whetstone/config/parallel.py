"""The section of several devices and machines: how weights are spread, and how a lost rank is noticed.

How many processes there are is the launcher's to say (torchrun and its like), not the configuration's.
"""

from typing import Any, Literal

from pydantic import Field, field_validator

from whetstone.config.base import MAX_SECONDS, Section


class ParallelConfig(Section):
    """How the ranks that a launcher started share the work: ddp_size x shards x tp_size of them."""

    tp_size: int = Field(default=1, ge=1, le=1_024)
    """Tensor-parallel ranks: each layer's matrices are split among so many neighbours, which work on the same
    tokens.
    """
    ddp_size: int = Field(default=1, ge=1, le=65_536)
    """Replicas: weights are sharded (FSDP2) inside each of so many groups of ranks and repeated between them.
    1: sharded over all ranks.
    """
    sequence_parallel: bool = False
    """With tp_size: norms and what flows between layers are split along the tokens in the update: less memory
    for activations.
    """
    cpu_offload: Literal["none", "optimizer", "all"] = "none"
    """Keep the optimiser's state and the reference's weights, or with several ranks the weights too, in the
    memory of the CPU while they aren't used. Without effect where the CPU trains.
    """
    heartbeat_timeout_s: float = Field(default=30.0, ge=2, le=600)
    """A rank that has not been heard of for so long is taken for dead, and all others end with that
    reason.
    """
    collective_timeout_s: float = Field(default=1800.0, ge=10, le=MAX_SECONDS)
    """Longest wait of one rank for the others (the slowest rollouts, the loading of a large model)."""

    @field_validator("cpu_offload", mode="before")
    @classmethod
    def _bool_is_known(cls, value: Any) -> Any:
        return {True: "all", False: "none"}.get(value, value) if isinstance(value, bool) else value
