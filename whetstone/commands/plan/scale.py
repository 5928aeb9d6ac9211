"""`whet plan --scale`: a run on clusters, on the terminal and as plain data."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import rich
from rich.table import Table
from rich.text import Text

from whetstone.commands.config import yaml_value
from whetstone.config import flatten
from whetstone.cost.scale import (
    MIN_GAIN,
    Job,
    Placement,
    Row,
    most_useful_count,
    paying_counts,
    with_fast_servers,
)
from whetstone.cost.simulation import simulate
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


def scale_document(job: Job, rows: Sequence[Row]) -> dict[str, Any]:
    """The table as plain data."""
    names = {True: "one_step_off", False: "synchronous"}
    return {
        "tokens": job.tokens,
        "rows": [
            {
                "gpus": row.gpus,
                "synchronous": _placement_document(job, row.colocated),
                "one_step_off": _placement_document(job, row.one_step_off),
                "better": None if row.best is None else names[row.is_one_step_off],
            }
            for row in rows
        ],
        "one_step_off_pays": paying_counts(rows),
        "one_step_off_pays_with_fast_servers": paying_counts(with_fast_servers(job, rows)),
        "most_useful_gpus": most_useful_count(rows),
    }


def _placement_document(job: Job, placement: Placement | None) -> dict[str, Any] | None:
    if placement is None:
        return None
    layout, stages = placement.layout, placement.stages
    document = {
        "ranks": layout.gpus,
        "replicas": layout.replicas,
        "shards": layout.shards,
        "tp_size": layout.tp,
        "servers": placement.servers,
        "server_tensor_parallel_size": placement.server_tp,
        "peak_bytes": placement.memory.peak,
        "update_s": stages.update_s,
        "transfer_s": stages.transfer_s,
        "exchange_s": stages.exchange_s,
        **asdict(placement.result),
        "tokens_per_s_and_gpu": placement.result.tokens_per_s / placement.gpus,
        "settings": settings_of(job, placement),
    }
    if placement.servers:
        in_turn = simulate(replace(stages, is_ahead=False), job.batches)
        document["synchronous_step_s"] = in_turn.step_s  # the same servers, in turn with the update
    return document


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
        return "It fits on none of these: `whet plan` without --scale has the changes that make it fit."
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
