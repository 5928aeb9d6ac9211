"""Bytes on each GPU by part, while sampling and in the update, and the micro-batch that fits.

Constants are fitted to peaks that were measured on one H200 (docs/lab/plan.md).
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from whetstone.config.engine_traits import engine_traits
from whetstone.config.plan import Plan
from whetstone.config.sections import Config
from whetstone.cost.shape import ModelShape
from whetstone.cost.step import BUCKETS, STATES
from whetstone.model.gated_lora import MAX_RANK
from whetstone.model.logprobs import FUSED_BYTES, FUSED_SHARE

# Of engines/native and update/micro_batch_size.py, which are above this package: a test compares them.
SLOTS, PAGE = 1024, 64
RESERVED = 1 << 30
CACHE_FRACTION, UPDATE_FRACTION = 0.85, 0.92
MAX_TOKENS, LORA_MAX_TOKENS, TARGET_TOKENS, CPU_TOKENS = 16384, 32768, 8192, 8192

CONTEXT = 0.7e9  # of CUDA itself, beside what torch counts
PROCESS = 0.7e9  # of Python and its libraries, on a CPU
GRAPHS = 0.25e9  # CUDA graphs and workspaces
NF4_BYTES = 0.5 + 4 / 64  # of a weight with its share of a scale
# Numbers that a layer keeps for the backward pass, beside queries, keys, values and the attention's output:
# in units of the hidden size and of the MLP's width.
KEPT_HIDDEN, KEPT_INNER, COMPILED, PLAIN = 2.8, 3.25, 0.99, 1.75
LORA_INNER = 2.3  # of an adapter on 16-bit weights, up to MAX_RANK: silu(gate) * up is computed again
HEAD_LAYERS = 0.78  # what the final norm and the loss keep, in layers
RECOMPUTE_LAYERS = 2.2  # what recomputing a checkpointed layer with an adapter takes, in layers


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the memory of a run depends on, beside the model."""

    bytes_per_number: int  # 2: bf16
    on_gpu: bool
    lora_r: int | None
    load_in_4bit: bool
    optim: str
    offload: bool
    has_reference: bool
    critic: Literal["none", "head", "model"]
    checkpointing: bool | None  # None: as needed
    micro_batch_tokens: int | None  # None: as many as fit
    num_sequences: int  # sampled at once
    group: int
    prompt_tokens: int
    completion_tokens: int
    samples_here: bool  # the engine is in this process
    in_process: bool = True  # by the native engine or by transformers
    shared_tokens: int = 0  # with which all prompts begin
    gpus: int = 1
    tp: int = 1
    replicas: int = 1

    @property
    def shards(self) -> int:
        return max(1, self.gpus // (self.tp * self.replicas))

    @property
    def longest(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes by part; `tokens` of a micro-batch and `checkpointed` layers that were chosen."""

    update: dict[str, float]
    rollout: dict[str, float]
    tokens: int
    checkpointed: int
    fits: bool

    @property
    def peak(self) -> float:
        return max(sum(self.update.values()), sum(self.rollout.values()))


def setup_of(
    config: Config,
    plan: Plan,
    *,
    prompt_tokens: int,
    shared_tokens: int = 0,
    gpus: int = 1,
    on_gpu: bool = True,
) -> Setup:
    """Read a configuration."""
    model, loss, size = config.model, config.loss, config.update.micro_batch_tokens
    had_adapter = Path(model.model_name_or_path, "adapter_config.json").is_file() or config.update.sft_steps
    # Otherwise the adapter is switched off.
    has_weights = loss.kl_reference == "moving" or not model.use_peft or bool(had_adapter)
    data_ranks = max(1, gpus // config.parallel.tp_size)
    sequences = -(-plan.prompts_per_batch // data_ranks) * plan.num_generations
    checkpointing, traits = model.gradient_checkpointing, engine_traits(config.rollout.rollout_engine)
    return Setup(
        bytes_per_number=2 if model.bf16 and on_gpu else 4,
        on_gpu=on_gpu,
        lora_r=model.lora_r if model.use_peft else None,
        load_in_4bit=model.load_in_4bit,
        optim=config.update.optim,
        offload=config.parallel.cpu_offload != "none" and on_gpu,
        has_reference=loss.beta > 0 and loss.kl_reference != "rollout" and has_weights,
        critic=config.critic.critic if loss.advantage == "gae" else "none",
        checkpointing=None if checkpointing == "auto" else checkpointing,
        micro_batch_tokens=None if size == "auto" else size,
        num_sequences=min(sequences, config.rollout.max_num_seqs or SLOTS),
        group=plan.num_generations,
        prompt_tokens=prompt_tokens,
        shared_tokens=shared_tokens,
        completion_tokens=config.rollout.max_completion_length,
        in_process=traits.in_process,
        samples_here=not (traits.has_servers and config.rollout.vllm_mode == "server"),
        gpus=gpus,
        tp=config.parallel.tp_size,
        replicas=config.parallel.ddp_size,
    )


def memory_plan(shape: ModelShape, setup: Setup, capacity: float) -> MemoryPlan:
    """The parts on each of `setup.gpus` devices of `capacity` bytes."""
    states = state_bytes(shape, setup, capacity)
    room = capacity - CONTEXT
    if not setup.on_gpu:
        states, room = {"process": PROCESS, **states}, capacity
    held = sum(states.values())
    logits = 2 * min(FUSED_BYTES, FUSED_SHARE * capacity) if setup.on_gpu else FUSED_BYTES  # and gradients
    fraction = UPDATE_FRACTION if setup.on_gpu else 1.0
    free = fraction * (room - held) - logits
    tokens, checkpointed = _micro_batch(shape, setup, free, logits)
    # On a CPU autograd keeps about three copies.
    logits = min(logits, (2 if setup.on_gpu else 3) * setup.bytes_per_number * shape.vocabulary * tokens)
    activations = activation_bytes(shape, setup, tokens, checkpointed)
    activations = max(activations, recompute_bytes(shape, setup, tokens, checkpointed) - logits)
    update = {**states, "activations": activations, "logits": logits}
    gradients = states["gradients"]
    rollout = {part: size for part, size in states.items() if part != "gradients"}
    least = 0.0
    if setup.samples_here:
        sampling = 8.0 * shape.vocabulary * setup.num_sequences
        cache = cache_bytes(shape, setup, setup.num_sequences)
        if setup.on_gpu:
            spare = room - held + gradients - RESERVED - sampling
            least = cache_bytes(shape, setup, min(setup.group, setup.num_sequences))
            cache = max(least, min(cache, CACHE_FRACTION * spare))
            rollout["CUDA graphs"] = GRAPHS
        rollout |= {"KV cache": cache, "logits": sampling}
    fits = activations <= free and sum(rollout.values()) <= room
    return MemoryPlan(update=update, rollout=rollout, tokens=tokens, checkpointed=checkpointed, fits=fits)


def adapter_parameters(shape: ModelShape, setup: Setup) -> int:
    return (setup.lora_r or 0) * shape.linear_sides


def trained_parameters(shape: ModelShape, setup: Setup) -> int:
    return shape.parameters if setup.lora_r is None else adapter_parameters(shape, setup)


def state_bytes(shape: ModelShape, setup: Setup, capacity: float) -> dict[str, float]:
    """What stays from step to step, and the gradients."""
    size, trained = setup.bytes_per_number, trained_parameters(shape, setup)
    alone = setup.gpus == 1
    split = 1 if alone else setup.tp * setup.shards
    frozen = 0 if setup.lora_r is None else shape.parameters
    parts = {"weights": 0.0, "adapter": 0.0, "gradients": 4.0 * trained / split}
    moments, low = STATES[setup.optim], 2.0 if alone and size == 2 else 0.0
    whole = float(size) if alone else 4.0
    if setup.lora_r is None:
        # On one GPU a float32 weight is two halves, whose upper one computes; in shards it is whole.
        parts["weights"] = whole * trained / split
    else:
        held = size * frozen
        if setup.load_in_4bit:
            held = size * (frozen - shape.linear) + NF4_BYTES * shape.linear
        parts["weights"] = held / split
        parts["adapter"] = 4.0 * trained / split
    states = (moments + (low if setup.lora_r is None else 0.0)) * trained / split
    parts["optimizer states"] = BUCKETS if setup.offload else states
    if setup.has_reference and not setup.offload:
        parts["reference"] = float(size) * trained / split
    if setup.critic == "model":
        states = 0.0 if setup.offload else low + moments  # its buckets are small beside the weights
        parts["critic"] = (whole + states + 4.0) * shape.parameters / split
    if not alone:  # the copy is what servers get, too
        parts["copy to sample from"] = 2.0 * shape.parameters / setup.tp
        parts["gathered layers"] = 2 * 2.0 * shape.parameters / setup.tp / shape.layers
    elif setup.samples_here and setup.on_gpu and setup.lora_r is not None and not setup.load_in_4bit:
        merged = float(size) * shape.linear  # a copy, if it leaves two thirds of what is free
        if merged < (capacity - CONTEXT - sum(parts.values())) / 3:
            parts["merged adapter"] = merged
    return {part: value for part, value in parts.items() if value or part in ("weights", "gradients")}


def activation_bytes(shape: ModelShape, setup: Setup, tokens: int, checkpointed: int) -> float:
    """Of a micro-batch: inputs of checkpointed layers, what the others and the loss keep."""
    plain = shape.layers - checkpointed
    inputs = setup.bytes_per_number * shape.hidden * checkpointed
    return tokens * (inputs + (plain + HEAD_LAYERS) * layer_bytes(shape, setup))


def recompute_bytes(shape: ModelShape, setup: Setup, tokens: int, checkpointed: int) -> float:
    """While the backward pass recomputes a checkpointed layer: what the loss and later layers kept is free.

    0 without an adapter, where the loss takes more in all that was measured.
    """
    if setup.lora_r is None or not checkpointed:
        return 0.0
    inputs = setup.bytes_per_number * shape.hidden * checkpointed
    return tokens * (inputs + RECOMPUTE_LAYERS * layer_bytes(shape, setup))


def layer_bytes(shape: ModelShape, setup: Setup) -> float:
    """What a layer keeps of a token."""
    heads = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    has_kernels = setup.on_gpu and not setup.load_in_4bit and shape.is_silu_gated
    is_fused = has_kernels and setup.lora_r is not None and setup.lora_r <= MAX_RANK
    numbers = KEPT_HIDDEN * shape.hidden + heads + (LORA_INNER if is_fused else KEPT_INNER) * shape.inner
    return (COMPILED if setup.on_gpu else PLAIN) * setup.bytes_per_number * numbers / setup.tp


def cache_bytes(shape: ModelShape, setup: Setup, sequences: int) -> float:
    """Keys and values of so many sequences; those of a prompt are shared by its group."""
    prompts = -(-sequences // setup.group)
    tokens = sequences * _paged(setup.completion_tokens) + prompts * _paged(setup.prompt_tokens)
    return tokens * shape.kv_bytes * setup.bytes_per_number / 2 / setup.tp


def _paged(tokens: int) -> int:
    return PAGE * math.ceil(tokens / PAGE)


def _micro_batch(shape: ModelShape, setup: Setup, free: float, logits: float) -> tuple[int, int]:
    """Tokens and checkpointed layers, as update/micro_batch_size.py chooses them."""
    total = -(-setup.num_sequences // setup.group) * setup.prompt_tokens
    total += setup.num_sequences * setup.completion_tokens
    limit = MAX_TOKENS if setup.lora_r is None else LORA_MAX_TOKENS
    limit = limit if setup.on_gpu else CPU_TOKENS
    most, target = (max(setup.longest, min(size, total)) for size in (limit, TARGET_TOKENS))
    if setup.micro_batch_tokens is not None:
        most = target = max(setup.longest, min(setup.micro_batch_tokens, total))

    def fitting(checkpointed: int) -> int:
        tokens = free / activation_bytes(shape, setup, 1, checkpointed)
        recompute = recompute_bytes(shape, setup, 1, checkpointed)
        return int(min(tokens, (free + logits) / recompute) if recompute else tokens)

    every = shape.layers
    if setup.checkpointing is not None or not setup.on_gpu:
        layers = every if setup.checkpointing else 0
        return max(setup.longest, min(most, fitting(layers))), layers
    if fitting(0) >= target:
        return min(most, fitting(0)), 0
    layers = next((number for number in range(1, every) if fitting(number) >= target), every)
    return max(setup.longest, min(target, fitting(layers))), layers
