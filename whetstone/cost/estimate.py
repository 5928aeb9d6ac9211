"""The plan of a run on one kind of device: memory, time, and changes that make it fit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from whetstone.config import Config, Plan, build, flatten, make_plan
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
    for change in changes(config):
        try:
            changed = build({**flatten(config), **change}) if change else config
            # Several ranks hold whole matrices nowhere.
            if gpus > 1 and changed.model.load_in_4bit:
                continue
            if estimate(changed, shape, prompts, capacity=capacity, gpus=gpus).memory.fits:
                return change
        except UserError:  # it does not go with the other settings, or not with so many ranks
            continue
    return None


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
