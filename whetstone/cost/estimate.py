"""The plan of a run on one kind of device: memory, time, and changes that make it fit."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from whetstone.config import Config, Plan, build, flatten, make_plan
from whetstone.config.engine_traits import engine_traits
from whetstone.cost.memory import MemoryPlan, Setup, memory_plan, setup_of, trained_parameters
from whetstone.cost.prompts import Prompts
from whetstone.cost.shape import ModelShape
from whetstone.cost.step import Machine
from whetstone.cost.timing import TimePlan, time_plan
from whetstone.errors import UserError

GPU_SIZES_GB = (16, 24, 40, 48, 80, 96, 141)
GPU_COUNTS = (1, 2, 4, 8)
MAX_FITTING_SHARE = 0.97  # of the printed memory that a process can have


@dataclass(frozen=True, kw_only=True)
class Estimate:
    shape: ModelShape
    setup: Setup
    plan: Plan
    memory: MemoryPlan
    time: TimePlan | None  # None: the device's rates are not known

    @property
    def trained(self) -> int:
        return trained_parameters(self.shape, self.setup)


Changes = dict[str, Any]


def estimate(
    config: Config,
    shape: ModelShape,
    prompts: Prompts,
    *,
    capacity: float,
    machine: Machine | None = None,
    gpus: int = 1,
    on_gpu: bool = True,
    tokens: float | None = None,
) -> Estimate:
    """`capacity`: bytes of a device. `tokens`: mean length of completions, by default the longest."""
    data_ranks = max(1, gpus // config.parallel.tp_size)
    plan = make_plan(config, num_problems=prompts.num_problems, world_size=data_ranks)
    setup = setup_of(
        config,
        plan,
        prompt_tokens=prompts.tokens,
        shared_tokens=prompts.shared,
        gpus=gpus,
        on_gpu=on_gpu,
    )
    memory = memory_plan(shape, setup, capacity)
    seconds = None
    if machine is not None:
        mean = min(tokens or setup.completion_tokens, setup.completion_tokens)
        seconds = time_plan(shape, setup, memory, machine, config, plan, mean)
    return Estimate(shape=shape, setup=setup, plan=plan, memory=memory, time=seconds)


def smallest_change(
    config: Config, shape: ModelShape, prompts: Prompts, *, capacity: float, gpus: int = 1
) -> Changes | None:
    """The first of `changes` that fits; {}: it fits as it is; None: nothing helps."""
    tried = (
        (change, _fitting(config, change, shape, prompts, capacity=capacity, gpus=gpus))
        for change in changes(config)
    )
    return next((change for change, plan in tried if plan is not None), None)


def fastest_layout(
    config: Config,
    shape: ModelShape,
    prompts: Prompts,
    *,
    capacity: float,
    machine: Machine,
    gpus: int,
    tokens: float | None = None,
) -> tuple[Changes, Changes, Estimate] | None:
    """The first of `changes` that fits in some layout, the fastest of these layouts, and the plan with both.

    The batch is that of one GPU. None: nothing helps.
    """
    plan, present = make_plan(config, num_problems=prompts.num_problems), flatten(config)
    batch = {"prompts_per_step": plan.prompts_per_batch // plan.minibatches} if gpus > 1 else {}
    for change in changes(config):
        options: list[tuple[float, Changes, Estimate]] = []
        for sizes in _layouts(config, shape, gpus, change):
            layout = {key: value for key, value in {**sizes, **batch}.items() if value != present[key]}
            changed = _fitting(
                config, {**layout, **change}, shape, prompts,
                capacity=capacity, machine=machine, gpus=gpus, tokens=tokens,
            )  # fmt: skip
            if changed is not None and changed.time is not None:
                options.append((changed.time.batch_s, layout, changed))
        if options:
            _, layout, plan = min(options, key=lambda option: option[0])
            return change, layout, plan
    return None


def _layouts(config: Config, shape: ModelShape, gpus: int, change: Changes) -> Iterator[Changes]:
    """tp_size and ddp_size: what the run does must go with split layers."""
    rollout, environments, model = config.rollout, config.environments, config.model
    has_dropout = model.lora_dropout > 0 and change.get("use_peft", model.use_peft)
    is_whole = engine_traits(rollout.rollout_engine).has_servers or has_dropout
    is_whole = is_whole or rollout.rollout_quantization != "none"
    is_whole = bool(is_whole or environments.agent or environments.rollout_func)
    sides = math.gcd(gpus, shape.heads, shape.kv_heads, shape.inner)
    for tp in _divisors(1 if is_whole else sides):
        yield from ({"tp_size": tp, "ddp_size": replicas} for replicas in _divisors(gpus // tp))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _fitting(
    config: Config, change: Changes, shape: ModelShape, prompts: Prompts, *, gpus: int, **device: Any
) -> Estimate | None:
    """The plan with `change`; None: it does not fit."""
    try:
        changed = build({**flatten(config), **change}) if change else config
        if gpus > 1 and changed.model.load_in_4bit:  # several ranks hold whole matrices nowhere
            return None
        plan = estimate(changed, shape, prompts, gpus=gpus, **device)
    except UserError:  # it does not go with the other settings, or not with so many ranks
        return None
    return plan if plan.memory.fits else None


def changes(config: Config) -> Iterator[Changes]:
    """From none to large ones; an adapter and shorter completions come last."""
    yield {}
    base: Changes = {}
    if config.update.micro_batch_tokens != "auto":
        base["micro_batch_tokens"] = "auto"
        yield dict(base)
    if config.model.gradient_checkpointing is False:
        base["gradient_checkpointing"] = "auto"
        yield dict(base)
    fuller: Sequence[Changes] = ()
    if not config.model.use_peft:
        eight_bits, offload = {"optim": "adamw_8bit"}, {"cpu_offload": "optimizer"}
        yield {**base, **eight_bits}
        yield {**base, **offload}
        yield {**base, **eight_bits, **offload}
        fuller = ({"use_peft": True},)
    if not config.model.load_in_4bit:
        fuller = (*fuller, {"use_peft": True, "load_in_4bit": True})
    for change in fuller:
        yield {**base, **change}
    last = {**base, **(fuller[-1] if fuller else {})}
    longest = config.rollout.max_completion_length
    for part in (2, 4):
        yield {**last, "max_completion_length": max(1, longest // part)}


def fit_table(config: Config, shape: ModelShape, prompts: Prompts) -> dict[int, dict[int, Changes | None]]:
    """GB of a GPU -> number of GPUs -> the smallest change that fits."""
    return {
        size: {
            gpus: smallest_change(config, shape, prompts, capacity=MAX_FITTING_SHARE * size * 1e9, gpus=gpus)
            for gpus in GPU_COUNTS
        }
        for size in GPU_SIZES_GB
    }
