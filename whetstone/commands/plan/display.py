"""A plan on the terminal."""

from dataclasses import dataclass

import rich
from rich.table import Table
from rich.text import Text

from whetstone.commands.config import yaml_value
from whetstone.commands.plan.device import Device
from whetstone.config import Config, Plan
from whetstone.cost.estimate import Changes, Estimate
from whetstone.cost.memory import Setup, trained_parameters
from whetstone.cost.prompts import Prompts
from whetstone.cost.shape import ModelShape
from whetstone.model.size import GENERATE
from whetstone.terminal.text import counted, duration, escape_controls

POWER_SHARE = 0.75  # of the printed power that a GPU draws in training
LORA_NOTE = "with a learning rate about ten times as high"


@dataclass(frozen=True)
class RunningCost:
    kwh: float | None  # None: the chip or its rates are not known
    price: float | None


def running_cost(plan: Estimate, device: Device, price: float | None) -> RunningCost:
    """Energy of the GPUs, and their price."""
    if plan.time is None:
        return RunningCost(None, None)
    hours = plan.setup.gpus * plan.time.total_s / 3600
    kwh = None if device.chip is None else POWER_SHARE * device.chip.watts * hours / 1000
    return RunningCost(kwh, None if price is None else price * hours)


def print_plan(
    config: Config,
    plan: Estimate,
    prompts: Prompts,
    device: Device,
    table: dict[int, dict[int, Changes | None]],
    *,
    price: float | None,
    tokens: float | None,
) -> None:
    print_run(config, plan.shape, plan.setup, plan.plan, prompts)
    _print_memory(plan, device)
    if plan.memory.fits:
        _print_time(plan, device, price, tokens)
    _print_table(table)


def print_run(config: Config, shape: ModelShape, setup: Setup, plan: Plan, prompts: Prompts) -> None:
    """What does not depend on the device."""
    _say(_model_line(config, shape, setup))
    if setup.in_process and shape.unsampled:
        _say(f"sampled {GENERATE}: the native engine has nothing for {shape.unsampled}; vLLM is faster")
    for line in plan.lines(config):
        _say(line)
    alike = f", the first {setup.shared_tokens:,} always the same" if setup.shared_tokens else ""
    _say(f"prompts of about {counted(setup.prompt_tokens, 'token')} ({prompts.source}){alike}")


def _model_line(config: Config, shape: ModelShape, setup: Setup) -> str:
    total, trained = shape.parameters, trained_parameters(shape, setup)
    share = "all trained" if trained >= total else f"an adapter of {_count(trained)} trained"
    kind = "bf16" if setup.bytes_per_number == 2 else "float32"
    if setup.load_in_4bit:
        kind += ", 4 bits beneath the adapter"
    return f"{config.model.model_name_or_path}: {_count(total)} parameters, {share}, {kind}"


def _print_memory(plan: Estimate, device: Device) -> None:
    memory, each = plan.memory, "each GPU" if plan.setup.gpus > 1 else device.name
    table = Table(box=None, padding=(0, 2), title=None, pad_edge=False)
    for column in ("GB", "update", "sampling"):
        table.add_column(column, justify="left" if column == "GB" else "right")
    for part in dict.fromkeys([*memory.update, *memory.rollout]):
        table.add_row(part, *(_gb(parts.get(part)) for parts in (memory.update, memory.rollout)))
    table.add_row("total", *(_gb(sum(parts.values())) for parts in (memory.update, memory.rollout)))
    _say(f"\nMemory of {each}, {device.capacity / 1e9:.0f} GB")
    rich.print(table)
    detail = ""
    if memory.checkpointed:
        detail = f", activation checkpointing in {memory.checkpointed} of {plan.shape.layers} layers"
    if memory.fits:
        _say(f"It fits, with micro-batches of {memory.tokens:,} tokens{detail}.")
    else:
        _say("It does not fit. The table below has the smallest change that makes it fit.")


def _print_time(plan: Estimate, device: Device, price: float | None, tokens: float | None) -> None:
    seconds = plan.time
    if seconds is None:
        _say("\nThe rates of this device are not known: no time is planned. --measure finds them out here.")
        return
    source = "measured rates" if device.is_measured else "rates of its data sheet"
    length = f"{tokens:g} tokens" if tokens else f"{plan.setup.completion_tokens:,} tokens, the longest"
    _say(f"\nTime on {counted(plan.setup.gpus, device.name)} ({source}), if completions have {length}")
    batches = counted(seconds.num_batches, "batch", "batches")
    stages = f"{seconds.rollout_s:.1f} s sampling, {seconds.update_s:.1f} s update"
    _say(f"  a batch   {seconds.batch_s:8.1f} s   ({stages})")
    others = f"{batches}, {seconds.eval_s:.0f} s of evaluations, {seconds.start_s:.0f} s to start"
    _say(f"  the run   {duration(seconds.total_s):>8}     ({others})")
    cost = running_cost(plan, device, price)
    if cost.kwh is not None:
        _say(f"  energy    {cost.kwh:8.2f} kWh" + ("" if cost.price is None else f", price {cost.price:.2f}"))
    elif cost.price is not None:
        _say(f"  price     {cost.price:8.2f}")
    if not tokens:
        _say("  Completions are often shorter (--tokens N). Prompts without reward variance cost no update.")


def _print_table(table: dict[int, dict[int, Changes | None]]) -> None:
    letters: dict[str, str] = {}
    grid = Table(box=None, padding=(0, 2), pad_edge=False)
    grid.add_column("GB of a GPU", justify="right")
    for count in next(iter(table.values())):
        grid.add_column(counted(count, "GPU"))
    for size, row in table.items():
        grid.add_row(str(size), *(_cell(change, letters) for change in row.values()))
    _say("\nWhere it fits")
    rich.print(grid)
    for text, letter in letters.items():
        _say(f"  {letter}  {text}" + (f"   ({LORA_NOTE})" if "use_peft" in text else ""))


def _cell(change: Changes | None, letters: dict[str, str]) -> str:
    if change is None:
        return "no"
    if not change:
        return "yes"
    text = " ".join(f"{key}={yaml_value(value)}" for key, value in change.items())
    return letters.setdefault(text, chr(ord("a") + len(letters)))


def _gb(size: float | None) -> str:
    return "" if size is None else f"{size / 1e9:.2f}" if size < 1e10 else f"{size / 1e9:.1f}"


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,}"


def _say(text: str) -> None:
    rich.print(Text(escape_controls(text)))
