"""`whet plan`: memory, time and cost of a configuration before it runs, without loading weights."""

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from whetstone.commands.parser import DEFAULT_RECIPE, CommandParser, add_settings, number, source_and_settings
from whetstone.errors import UserError

if TYPE_CHECKING:
    from whetstone.commands.plan.device import Device
    from whetstone.config import Config
    from whetstone.cost.estimate import Estimate
    from whetstone.cost.prompts import Prompts
    from whetstone.cost.shape import ModelShape

DESCRIPTION = """
Show what a run needs before it starts: parameters, batches, memory by part while sampling and in the update,
seconds a step, hours, and on which GPUs it fits; where it does not, the smallest change that makes it fit.
No weights are loaded. The device is this machine's GPU or CPU, or the one that --gpu names.
With --scale: a table of 1, 2, 4 and 8 GPUs, each with the fastest layout that fits.
"""
EXAMPLES = """
whet plan gsm8k
whet plan gsm8k --gpu "RTX 4090" use_peft=true
whet plan config/multi_tasks.yaml --gpu H100 --gpus 4 --price 2.5
whet plan quickstart --measure
whet plan gsm8k --gpu H100 --tokens 300 --scale
"""


def add_arguments(parser: CommandParser) -> None:
    add_settings(parser)
    parser.add_argument("--gpu", metavar="NAME", help="a GPU by its name (H100), or its memory in GB (24)")
    parser.add_argument("--gpus", type=number(int, 1), default=1, metavar="N", help="how many of them")
    parser.add_argument(
        "--tokens",
        type=number(float, 1),
        metavar="N",
        help="mean length of completions (default: the longest)",
    )
    parser.add_argument("--measure", action="store_true", help="measure the rates of this machine first")
    parser.add_argument("--scale", action="store_true", help="a table of 1, 2, 4 and 8 GPUs")
    parser.add_argument("--price", type=number(float), metavar="X", help="what a GPU costs an hour")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Print the plan; exit code 1 where it does not fit the device (--scale: any number of them)."""
    from whetstone.commands.plan.device import choose_device
    from whetstone.commands.plan.display import print_plan
    from whetstone.config import load
    from whetstone.cost.estimate import estimate, fit_table
    from whetstone.cost.prompts import look_at_prompts
    from whetstone.cost.shape import model_shape

    source, settings = source_and_settings(args)
    config = load(source or DEFAULT_RECIPE, settings).config
    device = choose_device(config, args.gpu, measure=args.measure)
    gpus = int(args.gpus)
    if gpus > 1 and not device.on_gpu:
        raise UserError("--gpus is for GPUs, and there is none here: name one with --gpu H100.")
    if args.scale and (device.machine is None or not device.on_gpu):
        raise UserError("--scale is for a GPU whose rates are known: name one with --gpu H100.")
    if args.scale and gpus > 8:
        raise UserError("--scale is for 1 to 8 GPUs: leave --gpus out, or --scale.")
    shape, prompts = model_shape(config.model.model_name_or_path), look_at_prompts(config)
    if args.scale:
        return _run_scale(args, config, shape, prompts, device)
    plan = estimate(
        config,
        shape,
        prompts,
        capacity=device.capacity,
        machine=device.machine,
        gpus=gpus,
        on_gpu=device.on_gpu,
        tokens=args.tokens,
    )
    table = fit_table(config, shape, prompts)
    if args.json:
        print(json.dumps(document(plan, device, table, args.price), indent=1))
    else:
        print_plan(config, plan, prompts, device, table, price=args.price, tokens=args.tokens)
    return int(not plan.memory.fits)


def _run_scale(
    args: argparse.Namespace, config: "Config", shape: "ModelShape", prompts: "Prompts", device: "Device"
) -> int:
    from whetstone.commands.plan.display import print_run
    from whetstone.commands.plan.scale import print_scale, scale_rows
    from whetstone.cost.estimate import GPU_COUNTS, estimate

    alone = estimate(config, shape, prompts, capacity=device.capacity)
    counts = sorted({*GPU_COUNTS, args.gpus})
    rows = scale_rows(config, shape, prompts, device, counts, args.tokens)
    fits = any(row["fits"] for row in rows)
    if args.json:
        device_data = {"name": device.name, "memory_bytes": device.capacity}
        data = {"model": asdict(shape), "device": device_data, "batch": asdict(alone.plan), "fits": fits}
        print(json.dumps({**data, "scale": rows}, indent=1))
    else:
        print_run(config, shape, alone.setup, alone.plan, prompts)
        print_scale(rows, device, args.tokens, alone.setup.completion_tokens)
    return int(not fits)


def document(
    plan: "Estimate", device: "Device", table: dict[int, dict[int, Any]], price: float | None
) -> dict[str, Any]:
    """The plan as plain data."""
    from whetstone.commands.plan.display import running_cost

    cost = running_cost(plan, device, price)
    return {
        "model": asdict(plan.shape) | {"trained": plan.trained},
        "device": {"name": device.name, "memory_bytes": device.capacity, "gpus": plan.setup.gpus},
        "batch": asdict(plan.plan),
        "prompt_tokens": plan.setup.prompt_tokens,
        "shared_prompt_tokens": plan.setup.shared_tokens,
        "memory_bytes": {"update": plan.memory.update, "sampling": plan.memory.rollout},
        "peak_bytes": plan.memory.peak,
        "fits": plan.memory.fits,
        "micro_batch_tokens": plan.memory.tokens,
        "checkpointed_layers": plan.memory.checkpointed,
        "seconds": None
        if plan.time is None
        else asdict(plan.time) | {"batch_s": plan.time.batch_s, "total_s": plan.time.total_s},
        "energy_kwh": cost.kwh,
        "price": cost.price,
        "fits_gpus": {
            str(size): {str(n): change for n, change in row.items()} for size, row in table.items()
        },
    }
