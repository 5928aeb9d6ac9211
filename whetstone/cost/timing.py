"""Seconds of a step and of a run, from a machine's rates."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from whetstone.config.plan import Plan
from whetstone.config.sections import Config
from whetstone.cost.chips import Chip
from whetstone.cost.memory import NF4_BYTES, MemoryPlan, Setup, trained_parameters
from whetstone.cost.shape import ModelShape
from whetstone.cost.step import (
    H200,
    STATES,
    UPDATE_TOKEN_S,
    Layout,
    Machine,
    Work,
    decode_step,
    prefill_seconds,
    update_seconds,
)
from whetstone.model.size import GENERATE_STEP_S

MEASURED_SHARE = 0.8  # of the printed rate that a large product reaches: 791 of 989 TFLOP/s on an H200
COPY_SHARE = 0.9  # of the printed memory speed that a copy reaches
LINK_SHARE = 350 / 450  # of the printed speed of a link; not measured here
SPREAD = 0.5  # standard deviation of the logarithm of completion lengths, where they end by themselves
SEGMENTS = 24  # of a rollout, each with as many sequences as are still running
START_S = {True: 45.0, False: 20.0}  # imports, loading, compilation and graphs on a GPU; on a CPU
# Of the host in a rollout: in all, for each sequence (reading, decoding, scoring) and each prompt (prefill).
ROLLOUT_S, SEQUENCE_S, PROMPT_S = 0.05, 0.2e-3, 1e-3
DEQUANTIZE_SHARE = 0.3  # of the memory's speed, layer by layer
CPU_LAYER_S = 60e-6  # of a decode step on a CPU, beside products


@dataclass(frozen=True, kw_only=True)
class TimePlan:
    rollout_s: float  # of a batch
    update_s: float  # of a batch: all its optimizer steps
    num_batches: int
    eval_s: float  # of all evaluations
    start_s: float

    @property
    def batch_s(self) -> float:
        return self.rollout_s + self.update_s

    @property
    def total_s(self) -> float:
        return self.start_s + self.eval_s + self.num_batches * self.batch_s


def chip_machine(chip: Chip) -> Machine:
    """The rates that a chip reaches, by its data sheet."""
    speed = COPY_SHARE * chip.gb_per_s * 1e9
    machine = machine_of(chip.part, MEASURED_SHARE * chip.tflops * 1e12, speed, chip.memory_gb * 1e9)
    near = LINK_SHARE * chip.link_gb_per_s * 1e9
    bus = machine.bus / 2 if chip.link_gb_per_s in (32, 300) else machine.bus  # PCIe 4
    return replace(machine, near_link=near, far_link=min(near, machine.far_link), bus=bus)


def machine_of(name: str, flops: float, memory_speed: float, memory: float) -> Machine:
    """A GPU of these rates, with the links of an H200."""
    slower = H200.memory_speed / memory_speed
    return Machine(
        name=name,
        flops=flops,
        memory_speed=memory_speed,
        memory=memory,
        near_link=H200.near_link,
        far_link=H200.far_link,
        token_s=UPDATE_TOKEN_S * slower,
    )


def measure_machine(name: str, memory: float, *, on_gpu: bool, seconds: float = 4.0) -> Machine:
    """Rates of this machine: large products and copies, each for some seconds."""
    import torch

    device, wait = torch.device("cuda" if on_gpu else "cpu"), torch.cuda.synchronize if on_gpu else bool
    side, dtype = (8192, torch.bfloat16) if on_gpu else (1536, torch.float32)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    source = torch.zeros((1 << 30) if on_gpu else (1 << 26), device=device, dtype=dtype)
    target = torch.empty_like(source)

    repeats = 10 if on_gpu else 1

    def rate(work: float, run: Callable[[], object]) -> float:
        run()
        best, deadline = 0.0, time.monotonic() + seconds
        while time.monotonic() < deadline or best == 0.0:
            wait()
            started_at = time.monotonic()
            for _ in range(repeats):
                run()
            wait()
            best = max(best, repeats * work / (time.monotonic() - started_at))
        return best

    flops = rate(2.0 * side**3, lambda: torch.mm(left, right))
    copy = rate(2.0 * source.numel() * source.element_size(), lambda: target.copy_(source))
    if on_gpu:
        return machine_of(name, flops, copy, memory)
    return Machine(
        name=name, flops=flops, memory_speed=copy, memory=memory, near_link=1e9, far_link=1e9, token_s=0.0,
        update_s=0.0,
    )  # fmt: skip


def time_plan(
    shape: ModelShape,
    setup: Setup,
    memory: MemoryPlan,
    machine: Machine,
    config: Config,
    plan: Plan,
    tokens: float,
) -> TimePlan:
    """`tokens`: the mean length of a completion."""
    update = batch_update_seconds(shape, setup, memory, machine, config, plan, tokens)
    data_ranks = max(1, setup.gpus // setup.tp)
    if config.loss.is_supervised and not config.rollout.rejection_sampling:
        rollout = 0.0
    else:
        completions = -(-plan.prompts_per_batch // data_ranks) * plan.num_generations
        rollout = rollout_seconds(shape, setup, machine, completions, tokens)
    evaluation = config.evaluation
    count = -(-evaluation.eval_num_samples * evaluation.eval_samples_per_problem // data_ranks)
    times = 1 + math.ceil(plan.num_steps / (plan.eval_every or plan.num_steps))
    times += 2 * int(evaluation.eval_greedy)  # at the start and the end
    eval_s = times * rollout_seconds(shape, setup, machine, count, tokens) if count else 0.0
    return TimePlan(
        rollout_s=rollout,
        update_s=update,
        num_batches=plan.num_batches,
        eval_s=eval_s,
        start_s=START_S[setup.on_gpu],
    )


def batch_update_seconds(
    shape: ModelShape,
    setup: Setup,
    memory: MemoryPlan,
    machine: Machine,
    config: Config,
    plan: Plan,
    tokens: float,
) -> float:
    """All optimizer steps of a batch, and its passes without gradients."""
    work = Work(
        prompts=plan.prompts_per_batch,
        group=plan.num_generations,
        prompt_tokens=setup.prompt_tokens,
        shared_tokens=setup.shared_tokens,
        new_tokens=round(tokens),
        micro_batch_tokens=memory.tokens,
        checkpointing=memory.checkpointed > shape.layers // 2,
        backward=4 if setup.lora_r is None else 2,
    )
    layout = Layout(gpus=setup.gpus, tp=setup.tp, replicas=setup.replicas)
    passes = 2.0 * extra_passes(config, plan) / (2 * (1 + int(work.checkpointing)) + work.backward)
    seconds = (config.update.num_iterations + passes) * update_seconds(machine, shape, work, layout)
    moved = (STATES[setup.optim] + 2) * trained_parameters(shape, setup) / (setup.tp * setup.shards)
    stream_s = moved / machine.bus if setup.offload else 0.0  # in and out at once
    return seconds + plan.updates_per_batch * (machine.update_s + stream_s)


def rollout_seconds(
    shape: ModelShape, setup: Setup, machine: Machine, sequences: int, tokens: float
) -> float:
    """Sampling `sequences` completions of `tokens` on average, at most `setup.completion_tokens`."""
    waves = math.ceil(sequences / setup.num_sequences)
    running = math.ceil(sequences / waves)
    prompts = -(-sequences // setup.group)
    layout = Layout(gpus=setup.gpus, tp=setup.tp)
    prompt_tokens = setup.shared_tokens + prompts * (setup.prompt_tokens - setup.shared_tokens)
    prefill = prefill_seconds(machine, shape, layout, prompt_tokens)
    width = setup.completion_tokens / SEGMENTS
    seconds = prefill + ROLLOUT_S + SEQUENCE_S * sequences + PROMPT_S * prompts if setup.on_gpu else prefill
    for segment in range(SEGMENTS):
        active = running * _still_running(width * (segment + 0.5), tokens, setup.completion_tokens)
        if active < 0.5:
            break
        seconds += waves * width * _decode_seconds(shape, setup, machine, active, width * segment)
    return seconds


def _still_running(length: float, mean: float, longest: int) -> float:
    """The share of completions that are longer: lognormal, or all as long as they may be."""
    if mean >= 0.95 * longest:
        return 1.0
    location = math.log(mean) - SPREAD**2 / 2
    return 0.5 * math.erfc((math.log(max(length, 1e-9)) - location) / (SPREAD * math.sqrt(2)))


def _decode_seconds(
    shape: ModelShape, setup: Setup, machine: Machine, sequences: float, generated: float
) -> float:
    """One token for each of `sequences`, which have `generated` tokens."""
    number = max(1, round(sequences))
    if not setup.on_gpu:
        weights = 4.0 * shape.weights_read(number) / machine.memory_speed
        return max(weights, 2.0 * shape.active * number / machine.flops) / 0.7 + shape.layers * CPU_LAYER_S
    work = Work(prompts=1, group=1, prompt_tokens=setup.prompt_tokens, new_tokens=round(2 * generated))
    seconds = decode_step(machine, shape, work, Layout(gpus=setup.gpus, tp=setup.tp), number)
    if setup.load_in_4bit:  # read in 4 bits, written and read once more in 16
        seconds += (2 + NF4_BYTES) * shape.linear / (DEQUANTIZE_SHARE * machine.memory_speed)
    return max(seconds, GENERATE_STEP_S) if setup.in_process and shape.unsampled else seconds


def extra_passes(config: Config, plan: Plan) -> int:
    """Forward passes over a batch without gradients, as update/experience.py makes them."""
    loss = config.loss
    to_sampler = loss.beta > 0 and loss.kl_reference == "rollout"
    own = plan.minibatches > 1 or to_sampler or loss.kl_in == "reward" or loss.advantage == "gae"
    return int(own) + int(loss.beta > 0 and not to_sampler)
