"""Seconds of a step on some number of devices, from operations, bytes and link speeds.

The constants are fitted to measurements on one H200; everything beyond one GPU is prediction.
`python benchmarks/cost_tables.py` compares both and prints the tables of docs/scale.md and docs/lab/scale.md.
"""

from dataclasses import dataclass

UPDATE_SHARE = 0.725  # of the peak, forward and backward, recomputation counted as work; compiled layers
UPDATE_TOKEN_S = 4.2e-6  # beside that for each token, whatever the size: attention, norms, gates, the rest
LORA_TOKEN_S = 2.4e-6  # and for each token of an adapter's thin products
UPDATE_S = 0.10  # of an update whatever its size: packing, uploads, the optimizer's launch
DECODE_SHARE = 0.86  # of the peak, or of the memory's speed, for the matrix products of a decode step
# A decode step's time per layer beside products and cache: the native engine with its fused kernels, and a
# model's own modules in a CUDA graph (from an early probe: 41,546 tokens/s at 1.5 B, 256 sequences).
LAYER_S = {"native": 24e-6, "graph": 150e-6}
VOCABULARY = 151_936  # of Qwen2.5, whose logits a decode step writes and reads once more to draw from
ACTIVATIONS = 52  # bytes per token, layer and hidden unit that the backward pass keeps without checkpointing
OVERLAP = 0.8  # share of FSDP's traffic that hides behind computation, where there is enough of it
IMBALANCE = 1.05  # the fullest rank has so much more than the mean
PICKLED = 24  # bytes per token of a rollout on its way to all ranks
# Adam's states per weight, beside the weight itself: two float32 moments, or two of 8 bits with scales.
STATES = {"adamw_torch": 8.0, "adamw_8bit": 2 + 8 / 256}
BUCKETS = 2 * 64 * 2**20  # on the device, where the states are on the host
HOST_LINK = 2e9  # bytes/s between hosts for such objects (gloo over TCP)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One GPU and its links; `flops` and `memory_speed` as measured, not as printed."""

    name: str
    flops: float
    memory_speed: float  # bytes/s
    memory: float  # bytes
    near_link: float  # bytes/s each way to GPUs of the same host
    far_link: float  # bytes/s each way to GPUs of other hosts
    per_host: int = 8
    token_s: float = UPDATE_TOKEN_S
    lora_token_s: float = LORA_TOKEN_S
    update_s: float = UPDATE_S


@dataclass(frozen=True, kw_only=True)
class Model:
    name: str
    parameters: float
    layers: int
    hidden: int
    kv_bytes: int  # of keys and values per token, all layers, bf16


@dataclass(frozen=True, kw_only=True)
class Work:
    """One optimizer step."""

    prompts: int
    group: int
    prompt_tokens: int
    new_tokens: int
    micro_batch_tokens: int = 32768
    checkpointing: bool = True
    backward: int = 4  # operations for each parameter in the backward pass: 2 beneath an adapter
    is_lora: bool = False

    @property
    def update_tokens(self) -> int:
        """A prompt is run once for its group."""
        return self.prompts * (self.prompt_tokens + self.group * self.new_tokens)


@dataclass(frozen=True, kw_only=True)
class Layout:
    gpus: int
    tp: int = 1
    replicas: int = 1
    optim: str = "adamw_torch"
    offload: bool = False  # states on the host
    decode: str | None = None  # None: native, or where layers are split an engine with plain CUDA graphs

    @property
    def shards(self) -> int:
        return self.gpus // (self.tp * self.replicas)

    @property
    def layer_s(self) -> float:
        return LAYER_S[self.decode or ("native" if self.tp == 1 else "graph")]

    @property
    def data(self) -> int:
        return self.gpus // self.tp


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of one step by stage, and bytes on each GPU."""

    rollout_s: float
    exchange_s: float
    update_s: float
    gather_s: float
    memory: float
    new_tokens: int

    @property
    def step_s(self) -> float:
        return self.rollout_s + self.exchange_s + self.update_s + self.gather_s

    @property
    def tokens_per_s(self) -> float:
        return self.new_tokens / self.step_s


def predict(machine: Machine, model: Model, work: Work, layout: Layout) -> Cost:
    completions = work.prompts * work.group
    fullest = min(completions, -(-work.prompts // layout.data) * work.group)  # groups stay whole
    rollout = work.new_tokens * decode_step(machine, model, work, layout, fullest)
    update = update_seconds(machine, model, work, layout)
    link = _link(machine, layout.shards * layout.tp)
    gather = 2 * model.parameters / layout.tp * (1 - 1 / layout.shards) / link
    exchange = 0.0
    if layout.gpus > machine.per_host:  # every rank of a host gets everything over the same wire
        exchange = completions * work.new_tokens * PICKLED * machine.per_host / HOST_LINK
    return Cost(
        rollout_s=rollout * IMBALANCE,
        exchange_s=exchange,
        update_s=update,
        gather_s=gather,
        memory=memory(model, work, layout),
        new_tokens=completions * work.new_tokens,
    )


def decode_step(machine: Machine, model: Model, work: Work, layout: Layout, sequences: int) -> float:
    """Seconds of a token for each of `sequences`: products (by bytes or flops), cache, logits, layers."""
    length = work.prompt_tokens + work.new_tokens / 2
    weights = 2 * model.parameters / layout.tp
    products = max(weights / machine.memory_speed, weights * sequences / machine.flops) / DECODE_SHARE
    cache = sequences * length * model.kv_bytes / layout.tp / machine.memory_speed
    logits = 2 * 2 * sequences * VOCABULARY / layout.tp / machine.memory_speed
    seconds = products + cache + logits + model.layers * layout.layer_s
    if layout.tp > 1:  # two sums a layer, each at least the latency of a small message
        traffic = 2 * sequences * model.hidden * 2 * (1 - 1 / layout.tp)
        seconds += 2 * model.layers * (20e-6 + traffic / machine.near_link)
    return seconds


def update_seconds(machine: Machine, model: Model, work: Work, layout: Layout) -> float:
    """Forward, backward and optimizer of the fullest rank, with the traffic that does not hide."""
    tokens = work.update_tokens / layout.data * (IMBALANCE if layout.data > 1 else 1.0)
    forward = 2 * (1 + int(work.checkpointing))
    products = (forward + work.backward) * model.parameters / (machine.flops * UPDATE_SHARE)
    rest = machine.token_s * (forward + 4) / 6 + (machine.lora_token_s if work.is_lora else 0.0)
    compute = tokens * (products + rest) / layout.tp
    batches = max(1.0, tokens / work.micro_batch_tokens)
    own = model.parameters / layout.tp
    # Gathered in bf16 on the way forward and back, gradients scattered in float32, each micro-batch.
    traffic = 8 * own * (1 - 1 / layout.shards) * batches
    sharding = traffic / _link(machine, layout.shards * layout.tp)
    replicas = 8 * own / layout.shards * batches / machine.far_link if layout.replicas > 1 else 0.0
    tensor = 0.0
    if layout.tp > 1:  # four sums of the activations a layer, six with recomputation
        sums = (6 if work.checkpointing else 4) * model.layers
        tensor = sums * tokens * model.hidden * 2 * 2 * (1 - 1 / layout.tp) / machine.near_link
    hidden = min(sharding + replicas, OVERLAP * compute)
    optimizer = 28 * own / layout.shards / machine.memory_speed
    return compute + tensor + sharding + replicas - hidden + optimizer


def memory(model: Model, work: Work, layout: Layout) -> float:
    """Weights, moments and gradients in shards; the copy to sample from; one gathered layer; activations.

    A float32 weight is 4 bytes, whole in a shard or in two halves on a GPU alone, whose upper half is what
    computes and samples: no copy there, and nothing to gather. The lower half goes to the host with the
    moments.
    """
    own = model.parameters / layout.tp
    alone = layout.gpus == 1
    states = 0.0 if layout.offload else STATES[layout.optim]
    weight = 2 if alone and layout.offload else 4
    shards = (weight + states + 4) * own / layout.shards + (BUCKETS if layout.offload else 0)
    copy = 0 if alone else 2 * own
    a_layer = 0 if alone else 2 * own / model.layers * 2
    width = model.hidden * work.micro_batch_tokens
    if work.checkpointing:
        activations = 2 * width * model.layers + ACTIVATIONS * width / layout.tp
    else:
        activations = ACTIVATIONS * width * model.layers / layout.tp
    return shards + copy + a_layer + activations


def _link(machine: Machine, spread: int) -> float:
    return machine.near_link if spread <= machine.per_host else machine.far_link


H200 = Machine(
    name="H200",
    flops=791e12,
    memory_speed=4.3e12,
    memory=139 * 2**30,
    near_link=350e9,  # NVLink 4: 450 printed; not measured here
    far_link=42e9,  # 400 Gb/s a GPU: 50 printed; not measured here
)
MODELS = {
    "0.5B": Model(name="0.5B", parameters=0.494e9, layers=24, hidden=896, kv_bytes=24 * 2 * 64 * 4),
    "1.5B": Model(name="1.5B", parameters=1.54e9, layers=28, hidden=1536, kv_bytes=28 * 2 * 128 * 4),
    "3B": Model(name="3B", parameters=3.09e9, layers=36, hidden=2048, kv_bytes=36 * 2 * 128 * 4),
    "7B": Model(name="7B", parameters=7.6e9, layers=28, hidden=3584, kv_bytes=28 * 4 * 128 * 4),
    "14B": Model(name="14B", parameters=14.8e9, layers=48, hidden=5120, kv_bytes=48 * 8 * 128 * 4),
    "32B": Model(name="32B", parameters=32.8e9, layers=64, hidden=5120, kv_bytes=64 * 8 * 128 * 4),
    "70B": Model(name="70B", parameters=70.6e9, layers=80, hidden=8192, kv_bytes=80 * 8 * 128 * 4),
}
