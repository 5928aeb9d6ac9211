"""The fastest layout of a run on 1 to 4,096 GPUs, synchronous and one step off.

python -m benchmarks.cluster six_tasks prompts_per_step=64 --gpu H200 --tokens 3000
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import rich
from rich.table import Table
from rich.text import Text

from benchmarks.cluster.layouts import (
    GPU_COUNTS,
    MIN_GAIN,
    Job,
    Placement,
    Row,
    make_job,
    most_useful_count,
    paying_counts,
    scale_rows,
    with_fast_servers,
)
from whetstone.commands.config import yaml_value
from whetstone.commands.parser import DEFAULT_RECIPE
from whetstone.config import flatten, load
from whetstone.cost.chips import CHIPS, find_chip
from whetstone.cost.prompts import look_at_prompts
from whetstone.cost.shape import model_shape
from whetstone.cost.timing import chip_machine
from whetstone.errors import UserError
from whetstone.terminal.text import counted, escape_controls

COLUMNS = ("GPUs", "colocated", "GB", "s", "tokens/s", "one step off", "s", "tokens/s")


def settings_of(job: Job, placement: Placement) -> dict[str, Any]:
    """What to add to the command line."""
    settings: dict[str, Any] = {"tp_size": placement.layout.tp, "ddp_size": placement.layout.replicas}
    if placement.servers:
        settings |= {"rollout_engine": "vllm", "vllm_mode": "server", "async_rollouts": 1}
        settings["server_tensor_parallel_size"] = placement.server_tp
    else:
        settings |= {"rollout_engine": "native", "async_rollouts": 0}
    if placement.gpus > 1:  # by default a batch grows with the ranks
        settings["prompts_per_step"] = job.plan.prompts_per_batch // job.plan.minibatches
    present = flatten(job.config)
    return {key: value for key, value in settings.items() if value != present.get(key)}


def print_scale(job: Job, rows: Sequence[Row], name: str) -> None:
    machine = job.machine
    longest = "" if job.tokens < job.setup.completion_tokens else ", the longest (--tokens N)"
    _say(f"\nCompletions of {job.tokens:,.0f} tokens on average{longest}, on {name}s")
    links = f"{machine.near_link / 1e9:.0f} GB/s in a host of {machine.per_host}"
    _say(f"with {links}, {machine.far_link / 1e9:.0f} GB/s between hosts (assumed)")
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if number in (1, 5) else "right", no_wrap=True)
    for row in rows:
        table.add_row(f"{row.gpus:,}", *_cells(row, row.colocated, 4), *_cells(row, row.one_step_off, 3))
    rich.print(table)
    _say("replicas x shards x tp_size + servers x their GPUs; s of a batch; GB and tokens/s of")
    _say("each GPU; * is better")
    _say("\nSettings of the better")
    for row in rows:
        if row.best is not None:
            _say(f"  {row.gpus:>5,}  {_settings_line(job, row.best)}")
    _say(f"\n{one_step_off_sentence(rows)}")
    fast = with_fast_servers(job, rows)
    if paying_counts(fast) != paying_counts(rows):
        _say("If servers decode split layers as fast as whole ones, which was not measured:")
        _say(one_step_off_sentence(fast))
    _say(more_gpus_sentence(job, rows))


def _cells(row: Row, placement: Placement | None, number: int) -> list[str]:
    if placement is None:
        return ["no" if row.gpus > 1 or number == 4 else ""] + [""] * (number - 1)
    layout, result = placement.layout, placement.result
    star = "*" if placement is row.best else " "
    seconds = f"{result.step_s:,.1f}{star}"
    each = f"{result.tokens_per_s / placement.gpus:,.0f}"
    if placement.servers:
        shape = f"{layout.replicas}x{layout.shards}x1 + {placement.servers}x{placement.server_tp}"
        return [shape, seconds, each]
    shape = f"{layout.replicas}x{layout.shards}x{layout.tp}"
    return [shape, f"{placement.memory.peak / 1e9:.0f}", seconds, each]


def _settings_line(job: Job, placement: Placement) -> str:
    settings = settings_of(job, placement)
    line = " ".join(f"{key}={yaml_value(value)}" for key, value in settings.items()) or "as it is"
    if placement.servers:
        ranks, servers = counted(placement.layout.gpus, "rank"), counted(placement.servers, "server")
        line += f"   ({ranks}, {servers})"
    return line


def one_step_off_sentence(rows: Sequence[Row]) -> str:
    faster, gain = paying_counts(rows), f"{100 * MIN_GAIN:.0f} %"
    fitting = [row.gpus for row in rows if row.best is not None]
    if not fitting:
        return "It fits on none of these: `whet plan` has the changes that make it fit."
    if not faster:
        fits = any(row.one_step_off is not None for row in rows)
        reason = ": it saves less than " + gain if fits else ": each rank would hold a copy of all weights"
        return f"One step off (async_rollouts=1) never pays here{reason}."
    if faster == fitting[fitting.index(faster[0]) :]:
        return f"One step off (async_rollouts=1) saves at least {gain} from {counted(faster[0], 'GPU')} on."
    numbers = ", ".join(f"{number:,}" for number in faster)
    return f"One step off (async_rollouts=1) saves at least {gain} on {numbers} GPUs only."


def more_gpus_sentence(job: Job, rows: Sequence[Row]) -> str:
    useful, prompts = most_useful_count(rows), job.plan.prompts_per_batch
    if useful is None or useful == rows[-1].gpus:
        return "Each of these numbers of GPUs makes a batch faster than the one before."
    groups = f"it has {counted(prompts, 'group')}, which stay whole, and waits for its longest completion"
    return f"More than {counted(useful, 'GPU')} save less than {100 * MIN_GAIN:.0f} % of a batch: {groups}."


def _say(text: str) -> None:
    rich.get_console().print(Text(escape_controls(text)), soft_wrap=True)  # lines to paste stay whole


def main(words: Sequence[str]) -> int:
    """Print the table; exit code 1 where the run fits on none of the numbers."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("settings", nargs="*", metavar="CONFIG key=value", help="as for `whet plan`")
    parser.add_argument("--gpu", required=True, metavar="NAME", choices=[chip.part for chip in CHIPS])
    parser.add_argument("--gpus", type=int, nargs="+", default=GPU_COUNTS, metavar="N", help="how many")
    parser.add_argument("--tokens", type=float, metavar="N", help="mean length of completions")
    args = parser.parse_intermixed_args(words)
    sources = [word for word in args.settings if "=" not in word]
    settings = [word for word in args.settings if "=" in word]
    config = load(sources[0] if sources else DEFAULT_RECIPE, settings).config
    chip = find_chip(args.gpu)
    assert chip is not None
    job = make_job(
        config,
        model_shape(config.model.model_name_or_path),
        look_at_prompts(config),
        machine=chip_machine(chip),
        capacity=chip.memory_gb * 1e9,
        tokens=args.tokens,
    )
    rows = scale_rows(job, args.gpus)
    print_scale(job, rows, chip.part)
    return int(all(row.best is None for row in rows))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(str(error))
