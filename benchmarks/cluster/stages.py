"""What the stages of a step take beyond one GPU: weights and rollouts on their way, and servers."""

from dataclasses import dataclass

from benchmarks.cluster.simulation import Engines
from whetstone.cost.shape import ModelShape
from whetstone.cost.step import (
    LAYER_S,
    SPLIT_LAYER_S,
    Layout,
    Machine,
    Work,
    cache_seconds,
    prefill_seconds,
    uncached_step,
)
from whetstone.cost.timing import ROLLOUT_S

# Of vLLM's host in a decode step with logprobs, during which the GPU computes: for the step and for each
# sequence (vLLM 0.24, benchmarks/results/rollout.json: 1.5 B with 8 sequences and with 256 of full length).
VLLM_STEP_S, VLLM_SEQUENCE_S = 3.0e-3, 33e-6
PICKLED = 24  # bytes per token of a rollout on its way to all ranks
HOST_LINK = 2e9  # bytes/s between hosts for such objects (gloo over TCP)


@dataclass(frozen=True, kw_only=True)
class ServerLayout(Layout):
    """A server, which may decode split layers in another time than ranks do."""

    split_layer_s: float = SPLIT_LAYER_S

    @property
    def layer_s(self) -> float:
        return LAYER_S if self.tp == 1 else self.split_layer_s


def vllm_engines(
    machine: Machine, shape: ModelShape, layout: Layout, *, number: int, slots: int, prompt_tokens: int
) -> Engines:
    """Servers, each in this layout, which take single samples."""
    return Engines(
        number=number,
        slots=slots,
        step_s=lambda sequences: uncached_step(machine, shape, layout, sequences),
        host_s=lambda sequences: VLLM_STEP_S + VLLM_SEQUENCE_S * sequences,
        cache_token_s=cache_seconds(machine, shape, layout),
        prompt_tokens=prompt_tokens,
        start_s=ROLLOUT_S,
        prompt_s=prefill_seconds(machine, shape, layout, prompt_tokens),
        is_shared=True,
    )


def gather_seconds(machine: Machine, num_bytes: float, layout: Layout) -> float:
    """Whole weights of `num_bytes` from their shards, on every rank."""
    link = machine.link(layout.shards * layout.tp)
    return num_bytes / layout.tp * (1 - 1 / layout.shards) / link


def transfer_seconds(machine: Machine, num_bytes: float, layout: Layout, servers: int, tp: int) -> float:
    """The first rank gathers the weights and sends them to each server, which has `tp` GPUs."""
    link = machine.link(layout.gpus + servers * tp)
    return gather_seconds(machine, num_bytes, layout) + servers * num_bytes / link


def exchange_seconds(machine: Machine, work: Work, layout: Layout) -> float:
    """Rollouts to all ranks; within a host by memory."""
    if layout.gpus <= machine.per_host:
        return 0.0
    # Every rank of a host gets everything over the same wire.
    return work.prompts * work.group * work.new_tokens * PICKLED * machine.per_host / HOST_LINK
