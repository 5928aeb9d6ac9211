"""Seconds of the stages of a step on some number of devices, from operations, bytes and link speeds.

The constants are fitted to measurements on one H200; everything beyond one GPU is prediction.
`python -m benchmarks.cost_tables` compares both and prints the tables of docs/scale.md and docs/lab/scale.md.
"""

from dataclasses import dataclass

from whetstone.cost.shape import ModelShape

UPDATE_SHARE = 0.725  # of the peak, forward and backward, recomputation counted as work; compiled layers
UPDATE_TOKEN_S = 4.2e-6  # beside that for each token, whatever the size: attention, norms, gates, the rest
UPDATE_S = 0.10  # of an update whatever its size: packing, uploads, the optimizer's launch
PREFILL_SHARE = 0.6  # of the peak, for the prompts
DECODE_SHARE = 0.86  # of the peak, or of the memory's speed, for the matrix products of a decode step
# A decode step's time per layer beside products and cache: with fused kernels, and where layers are split a
# model's own modules in a CUDA graph (from an early probe: 41,546 tokens/s at 1.5 B, 256 sequences).
LAYER_S, SPLIT_LAYER_S = 24e-6, 150e-6
OVERLAP = 0.8  # share of FSDP's traffic that hides behind computation, where there is enough of it
HOP_S = 5e-6  # of a collective for each rank in its ring; not measured here
IMBALANCE = 1.05  # the fullest rank has so much more than the mean
# Adam's states per weight, beside the weight itself: two float32 moments, or two of 8 bits with scales.
STATES = {"adamw_torch": 8.0, "adamw_8bit": 2 + 8 / 256}
BUCKETS = 2 * 64 * 2**20  # on the device, where the states are on the host


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One GPU and its links; `flops` and `memory_speed` as measured, not as printed."""

    name: str
    flops: float
    memory_speed: float  # bytes/s
    memory: float  # bytes
    near_link: float  # bytes/s each way to GPUs of the same host
    far_link: float  # bytes/s each way to GPUs of other hosts
    bus: float = 50e9  # bytes/s each way to host memory: PCIe 5; not measured here
    per_host: int = 8
    token_s: float = UPDATE_TOKEN_S
    update_s: float = UPDATE_S

    def link(self, spread: int) -> float:
        """Bytes/s each way among so many GPUs."""
        return self.near_link if spread <= self.per_host else self.far_link


@dataclass(frozen=True, kw_only=True)
class Work:
    """One optimizer step."""

    prompts: int
    group: int
    prompt_tokens: int
    new_tokens: int
    shared_tokens: int = 0  # with which all prompts begin
    micro_batch_tokens: int = 32768
    checkpointing: bool = True
    backward: int = 4  # operations for each parameter in the backward pass: 2 beneath an adapter

    @property
    def update_tokens(self) -> int:
        """A prompt is run once for its group, and what all prompts begin with once."""
        own = self.prompt_tokens - self.shared_tokens
        return self.shared_tokens + self.prompts * (own + self.group * self.new_tokens)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Ranks: replicas x shards x tp."""

    gpus: int
    tp: int = 1
    replicas: int = 1

    @property
    def shards(self) -> int:
        return self.gpus // (self.tp * self.replicas)

    @property
    def layer_s(self) -> float:
        return LAYER_S if self.tp == 1 else SPLIT_LAYER_S

    @property
    def data(self) -> int:
        return self.gpus // self.tp


def decode_step(machine: Machine, shape: ModelShape, work: Work, layout: Layout, sequences: int) -> float:
    """Seconds of a token for each of `sequences`, half of whose new tokens are there."""
    length = work.prompt_tokens + work.new_tokens / 2
    cached = sequences * length * cache_seconds(machine, shape, layout)
    return uncached_step(machine, shape, layout, sequences) + cached


def uncached_step(machine: Machine, shape: ModelShape, layout: Layout, sequences: int) -> float:
    """A decode step without reading the cache: products (by bytes or flops), logits, layers."""
    read, multiplied = (2 * number / layout.tp for number in (shape.weights_read(sequences), shape.active))
    products = max(read / machine.memory_speed, multiplied * sequences / machine.flops) / DECODE_SHARE
    # Logits are written and read once more to draw from.
    logits = 2 * 2 * sequences * shape.vocabulary / layout.tp / machine.memory_speed
    seconds = products + logits + shape.layers * layout.layer_s
    if layout.tp > 1:  # two sums a layer, each at least the latency of a small message
        traffic = 2 * sequences * shape.hidden * 2 * (1 - 1 / layout.tp)
        seconds += 2 * shape.layers * (20e-6 + traffic / machine.near_link)
    return seconds


def cache_seconds(machine: Machine, shape: ModelShape, layout: Layout) -> float:
    """Reading the keys and values of one token."""
    return shape.kv_bytes / layout.tp / machine.memory_speed


def prefill_seconds(machine: Machine, shape: ModelShape, layout: Layout, tokens: int) -> float:
    return 2 * shape.active * tokens / (PREFILL_SHARE * machine.flops * layout.tp)


def update_seconds(machine: Machine, shape: ModelShape, work: Work, layout: Layout) -> float:
    """Forward, backward and optimizer of the fullest rank, with the traffic that does not hide."""
    tokens = work.update_tokens / layout.data * (IMBALANCE if layout.data > 1 else 1.0)
    tokens = max(tokens, work.prompt_tokens + work.new_tokens)  # a sequence stays whole
    forward = 2 * (1 + int(work.checkpointing))
    products = (forward + work.backward) * shape.active / (machine.flops * UPDATE_SHARE)
    rest = machine.token_s * (forward + 4) / 6
    compute = tokens * (products + rest) / layout.tp
    batches = max(1.0, tokens / work.micro_batch_tokens)
    own = shape.parameters / layout.tp
    # Gathered in bf16 on the way forward and back, gradients scattered in float32, each micro-batch.
    traffic = 8 * own * (1 - 1 / layout.shards) * batches
    sharding = traffic / machine.link(layout.shards * layout.tp)
    sharding += 3 * shape.layers * batches * (layout.shards - 1) * HOP_S
    replicas = 8 * own / layout.shards * batches / machine.far_link if layout.replicas > 1 else 0.0
    tensor = 0.0
    if layout.tp > 1:  # four sums of the activations a layer, six with recomputation
        sums = (6 if work.checkpointing else 4) * shape.layers
        tensor = sums * tokens * shape.hidden * 2 * 2 * (1 - 1 / layout.tp) / machine.near_link
    hidden = min(sharding + replicas, OVERLAP * compute)
    optimizer = 28 * own / layout.shards / machine.memory_speed
    return compute + tensor + sharding + replicas - hidden + optimizer


H200 = Machine(
    name="H200",
    flops=791e12,
    memory_speed=4.3e12,
    memory=139 * 2**30,
    near_link=350e9,  # NVLink 4: 450 printed; not measured here
    far_link=42e9,  # 400 Gb/s a GPU: 50 printed; not measured here
)
