"""The device that a plan is for."""

from dataclasses import dataclass

from whetstone.config import Config
from whetstone.cost.chips import CHIPS, Chip, find_chip
from whetstone.cost.step import Machine
from whetstone.cost.timing import chip_machine, measure_machine
from whetstone.errors import UserError
from whetstone.run.host import memory_limit


@dataclass(frozen=True, kw_only=True)
class Device:
    name: str
    capacity: float  # bytes
    on_gpu: bool
    machine: Machine | None  # None: rates unknown
    chip: Chip | None
    is_measured: bool = False


def choose_device(config: Config, name: str | None, *, measure: bool) -> Device:
    """The GPU that is named, or this machine's GPU or CPU as the configuration says."""
    import torch

    if name is not None:
        if measure:
            raise UserError("--measure is for this machine: leave --gpu out.")
        return _named(name)
    if torch.cuda.is_available() and config.model.device != "cpu":
        properties = torch.cuda.get_device_properties(0)
        chip = find_chip(properties.name)
        machine = None if chip is None else chip_machine(chip)
        if measure:
            machine = measure_machine(properties.name, float(properties.total_memory), on_gpu=True)
        return Device(
            name=properties.name,
            capacity=float(properties.total_memory),
            on_gpu=True,
            machine=machine,
            chip=chip,
            is_measured=measure,
        )
    memory = float(memory_limit())
    machine = measure_machine("CPU", memory, on_gpu=False, seconds=4.0 if measure else 0.5)
    return Device(name="CPU", capacity=memory, on_gpu=False, machine=machine, chip=None, is_measured=True)


def _named(name: str) -> Device:
    chip = find_chip(name)
    if chip is not None:
        capacity = chip.memory_gb * 1e9
        return Device(name=chip.part, capacity=capacity, on_gpu=True, machine=chip_machine(chip), chip=chip)
    try:
        size = float(name.lower().removesuffix("gb"))
    except ValueError:
        size = 0.0
    if not 1 <= size <= 10_000:
        known = ", ".join(chip.part for chip in CHIPS)
        raise UserError(
            f"--gpu is '{name[:50]}', which is not known: give its memory in GB, or one of {known}."
        )
    return Device(name=f"a GPU of {size:g} GB", capacity=size * 1e9, on_gpu=True, machine=None, chip=None)
