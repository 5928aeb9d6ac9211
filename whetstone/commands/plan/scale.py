"""`whet plan --scale`: the fastest layout on each of some numbers of GPUs."""

from collections.abc import Sequence
from typing import Any

import rich
from rich.text import Text

from whetstone.commands.config import yaml_value
from whetstone.commands.plan.device import Device
from whetstone.commands.plan.display import LORA_NOTE
from whetstone.config import Config
from whetstone.cost.estimate import fastest_layout
from whetstone.cost.prompts import Prompts
from whetstone.cost.shape import ModelShape
from whetstone.terminal.text import escape_controls

Row = dict[str, Any]
COLUMNS = "{:>4}  {:<7}  {:>5}  {:>9}  {:>10}  {}"


def scale_rows(
    config: Config,
    shape: ModelShape,
    prompts: Prompts,
    device: Device,
    counts: Sequence[int],
    tokens: float | None,
) -> list[Row]:
    """The rows as plain data; `fits`: with no other change than the layout."""
    assert device.machine is not None
    rows: list[Row] = []
    for gpus in counts:
        fastest = fastest_layout(
            config, shape, prompts,
            capacity=device.capacity, machine=device.machine, gpus=gpus, tokens=tokens,
        )  # fmt: skip
        row: Row = {"gpus": gpus, "fits": fastest is not None and not fastest[0], "settings": None}
        if fastest is not None:
            change, layout, plan = fastest
            seconds = plan.time
            assert seconds is not None
            longest = plan.setup.completion_tokens
            sampled = plan.plan.completions_per_batch * min(tokens or longest, longest)
            row |= {
                "settings": {**layout, **change},
                "peak_bytes": plan.memory.peak,
                "rollout_s": seconds.rollout_s,
                "update_s": seconds.update_s,
                "batch_s": seconds.batch_s,
                "tokens_per_s": sampled / seconds.batch_s,
            }
        rows.append(row)
    return rows


def print_scale(rows: Sequence[Row], device: Device, tokens: float | None, longest: int) -> None:
    length = f"{tokens:,g} tokens on average" if tokens else f"{longest:,} tokens, the longest (--tokens N)"
    _say(f"\nThe same batch on {device.name}, if completions have {length}")
    _say(COLUMNS.format("GPUs", "fits", "GB", "s a batch", "tokens/s", "settings to add"))
    for row in rows:
        settings = row["settings"]
        if settings is None:
            _say(COLUMNS.format(row["gpus"], "no", "", "", "", "").rstrip())
            continue
        gb, seconds = f"{row['peak_bytes'] / 1e9:.0f}", f"{row['batch_s']:,.1f}"
        added = " ".join(f"{key}={yaml_value(value)}" for key, value in settings.items()) or "none"
        fits = "yes" if row["fits"] else "changed"
        _say(COLUMNS.format(row["gpus"], fits, gb, seconds, f"{row['tokens_per_s']:,.0f}", added))
    _say("GB of each GPU; tokens/s of the completions of a batch, on all GPUs")
    changes = [row["settings"] for row in rows if row["settings"] and not row["fits"]]
    if changes:
        note = f" (use_peft: {LORA_NOTE})" if any("use_peft" in change for change in changes) else ""
        _say(f"changed: it fits in no layout without these settings{note}")
    if not any(row["fits"] for row in rows):
        _say("8 GPUs do not suffice: `python -m benchmarks.cluster` in the repository searches up to 4,096.")


def _say(text: str) -> None:
    rich.get_console().print(Text(escape_controls(text)), soft_wrap=True)  # lines to paste stay whole
