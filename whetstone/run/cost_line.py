"""One line at the start of a run: the memory and time that `whet plan` expects."""

import torch

from whetstone.config import Config
from whetstone.cost.chips import find_chip
from whetstone.cost.estimate import Estimate, estimate
from whetstone.cost.prompts import count_prompts
from whetstone.cost.shape import shape_of
from whetstone.cost.timing import chip_machine
from whetstone.errors import UserError
from whetstone.model.chat import Chat
from whetstone.model.memory import usable_memory
from whetstone.model.policy import Policy
from whetstone.run.host import memory_limit
from whetstone.tasks.mixture import Mixture
from whetstone.terminal.text import duration


def describe_cost(policy: Policy, config: Config, tasks: Mixture) -> list[str]:
    """Nothing where the model has no plan."""
    on_gpu = policy.device.type == "cuda"
    try:
        planned, capacity = _estimate(policy, config, tasks, on_gpu)
    except UserError:
        return []
    where = "of GPU memory" if on_gpu else "of memory"
    each = " on each GPU" if policy.ranks.world_size > 1 else ""
    text = f"about {planned.memory.peak / 1e9:.2g} of {capacity / 1e9:.0f} GB {where} needed{each}"
    if planned.time is not None:
        text += (
            f"; with completions of full length {planned.time.batch_s:.2g} s a batch and "
            f"{duration(planned.time.total_s)} for the run"
        )
    return [text]


def _estimate(policy: Policy, config: Config, tasks: Mixture, on_gpu: bool) -> tuple[Estimate, float]:
    prompts = count_prompts(config, tasks, Chat(policy.tokenizer, config.model))
    capacity = float(usable_memory(policy.device) if on_gpu else memory_limit())
    chip = find_chip(torch.cuda.get_device_name(policy.device)) if on_gpu else None
    planned = estimate(
        config,
        shape_of(config.model.model_name_or_path, policy.lm.config),
        prompts,
        capacity=capacity,
        machine=None if chip is None else chip_machine(chip),
        gpus=policy.ranks.world_size,
        on_gpu=on_gpu,
    )
    return planned, capacity
