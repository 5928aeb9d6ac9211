"""The one page of `whet profile`: tables in Markdown, a picture of bars, and what to try, if anything.

Every sentence is derived from the numbers beside it. Measures nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from whetstone.commands.profile.trace import IDLE, KINDS, TimeBreakdown
from whetstone.config import Config
from whetstone.config.engine_traits import engine_traits
from whetstone.files import atomic_write

STAGES = ("weight_sync", "rollout", "reward_wait", "update")
PARTS = ("prepare", "forward", "head", "backward", "optimiser", "other")
COLOURS = {
    "matrix products": "#1f6f78", "attention": "#6a7fb5", "elementwise": "#c8793a", "optimiser": "#a05f8a",
    "drawing tokens": "#8a9a4b", "copies": "#c2a83e", "collective": "#b24b4b", "other": "#7a6a58",
    IDLE: "#d9d7d0",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Everything the page tells."""

    name: str
    date: str
    model: str  # in words
    device: str
    memory_gb: float | None  # of a GPU
    config: Config
    peak_flops: float | None
    rows: list[dict[str, float]]  # of the timed steps
    peaks_gb: list[dict[str, float]]  # of the same, by stage
    profiled: dict[str, float]  # the row of the step under the profiler
    spent: TimeBreakdown

    def mean(self, key: str) -> float:
        return fmean(row[key] for row in self.rows)

    def share(self, stage: str) -> float:
        return self.mean(f"time/{stage}") / self.mean("step_time")

    def peak_gb(self, stage: str) -> float:
        return max(peaks[stage] for peaks in self.peaks_gb)

    def kinds(self, stage: str) -> dict[str, float]:
        """Shares of a stage's seconds by kind, the largest first."""
        found = self.spent.kinds.get(stage, {})
        total = sum(found.values()) or 1.0
        shares = {kind: found.get(kind, 0.0) / total for kind in KINDS}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))


def show_page(text: str) -> None:
    """The page in the terminal, its tables drawn; a picture can't be shown there."""
    import rich
    from rich.markdown import Markdown

    lines = [line for line in text.splitlines() if not line.startswith("![")]
    rich.get_console().print(Markdown("\n".join(lines)))


def write_page(found: Profile, path: Path, *, picture: str, trace: str) -> str:
    text = "\n\n".join(
        [
            f"# Profile of {found.name}",
            f"{found.date}, {found.device}. {found.model}.",
            _speed(found),
            "## Where a step's time goes",
            _stages(found),
            "## What it is spent on",
            _kinds(found, picture),
            "## The update's parts",
            _parts(found),
            "## The longest " + ("kernels" if found.spent.on_gpu else "operators"),
            _longest(found),
            *([f"**Try first:** {advice(found)}"] if advice(found) else []),
            f"`{trace}` opens in ui.perfetto.dev or chrome://tracing; the program's own marks begin with "
            "`whet:`.",
        ]
    )
    atomic_write(path, text + "\n")
    return text


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "--:|" * (len(heads) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _speed(found: Profile) -> str:
    text = (
        f"**{found.mean('step_time'):.2f} s a step**: {found.mean('rollout_tokens_per_s'):,.0f} tokens/s "
        f"sampled, {found.mean('update_tokens_per_s'):,.0f} tokens/s in the update"
    )
    if found.peak_flops is not None:
        peak = found.peak_flops / 1e12
        text += f", which is {100 * found.mean('mfu'):.1f} % of {peak:,.4g} TFLOP/s (MFU, 6 N per token)"
    return f"{text}. Peak memory {max(found.peak_gb(s) for s in ('rollout', 'update')):.2f} GB."


def _stages(found: Profile) -> str:
    whole, rows = found.mean("step_time"), []
    for stage in STAGES:
        seconds = found.mean(f"time/{stage}")
        peak = f"{found.peak_gb(stage):.2f}" if stage in found.peaks_gb[0] else ""
        rows.append([stage, f"{seconds:.3f}", f"{100 * seconds / whole:.1f} %", peak])
    rest = whole - sum(found.mean(f"time/{stage}") for stage in STAGES)
    rows.append(["the rest", f"{rest:.3f}", f"{100 * rest / whole:.1f} %", ""])
    number = len(found.rows)
    note = f"Means of {number} {'step' if number == 1 else 'steps'} after one to warm up, without profiler."
    note += " Score is what is waited for scores after the last sample; sync, weights on their way to the"
    note += " engine; the rollout's peak is of all three."
    return _table(["stage", "seconds", "share", "peak GB"], rows) + f"\n\n{note}"


def _kinds(found: Profile, picture: str) -> str:
    stages = [stage for stage in ("rollout", "update") if stage in found.spent.kinds]
    rows = []
    for kind in KINDS:
        seconds = [found.spent.kinds[stage].get(kind, 0.0) for stage in stages]
        if max(seconds) == 0:
            continue
        cells = [
            f"{one:.3f} ({100 * found.kinds(s)[kind]:.0f} %)" for s, one in zip(stages, seconds, strict=True)
        ]
        rows.append([kind, *cells])
    step = found.profiled["step_time"]
    what = "kernels and copies" if found.spent.on_gpu else "operators, each without those inside it"
    idle = (
        "the device waited for the host" if found.spent.on_gpu else "Python ran between operators, or waited"
    )
    note = (
        f"Seconds of one step of {step:.2f} s under the profiler, by {what}; idle: {idle}. "
        "The rollout includes score and sync."
    )
    return f"![{picture}]({picture})\n\n" + _table(["", *stages], rows) + f"\n\n{note}"


def _parts(found: Profile) -> str:
    total = sum(found.spent.parts.values()) or 1.0
    rows = [
        [part, f"{found.spent.parts[part]:.3f}", f"{100 * found.spent.parts[part] / total:.0f} %"]
        for part in PARTS
        if found.spent.parts.get(part, 0.0) > 0
    ]
    note = "Prepare is what runs before the first gradient (old logprobs, reference, values); the head's own "
    note += "backward pass is in backward."
    return _table(["part", "seconds", "share"], rows) + f"\n\n{note}"


def _longest(found: Profile) -> str:
    rows = [
        [f"`{_short(name)}`", kind, f"{calls:,}", f"{seconds:.3f}"]
        for kind, name, calls, seconds in found.spent.longest
    ]
    return _table(["name", "kind", "calls", "seconds"], rows)


def _short(name: str, width: int = 70) -> str:
    name = name.replace("|", "/").replace("`", "'").removeprefix("void ")
    return name if len(name) <= width else name[: width - 1] + "…"


def advice(found: Profile) -> str | None:
    """The setting to try first, with the number that speaks for it; None where nothing stands out."""
    told: list[tuple[float, str]] = []  # share of a step that it is about
    for stage, find in (("rollout", _of_rollout), ("update", _of_update)):
        if found.share(stage) > 0.3:
            told += [(found.share(stage), sentence) for sentence in find(found)]
    if found.share("reward_wait") > 0.15:
        percent = 100 * found.share("reward_wait")
        sentence = f"Scores are waited for ({percent:.0f} % of a step): "
        sentence += "more reward_workers, or a quicker reward function."
        told.append((found.share("reward_wait"), sentence))
    if found.share("weight_sync") > 0.15:
        sentence = f"Handing weights to the engine takes {100 * found.share('weight_sync'):.0f} % of a step: "
        sentence += "rollout_engine=native samples from the policy's own, or weight_transfer by nccl or ipc."
        told.append((found.share("weight_sync"), sentence))
    return max(told, key=lambda entry: entry[0])[1] if told else None


def _of_rollout(found: Profile) -> list[str]:
    config, idle = found.config.rollout, found.kinds("rollout")[IDLE]
    told = []
    if engine_traits(config.rollout_engine).uses_attn_implementation:
        told.append("rollout_engine=native samples faster than transformers' generate.")
    if idle > 0.4:
        told.append(
            f"In the rollout the device is idle {100 * idle:.0f} % of the time: more sequences at once "
            "(prompts_per_step, num_generations) cost little more."
        )
    if found.share("rollout") > 0.5 and found.spent.on_gpu and found.config.rollout.async_rollouts == 0:
        told.append("async_rollouts=1 samples the next batch while the update learns from this one.")
    return told


def _of_update(found: Profile) -> list[str]:
    config, idle = found.config, found.kinds("update")[IDLE]
    spare = None if found.memory_gb is None else 1 - found.peak_gb("update") / found.memory_gb
    told = []
    if config.model.gradient_checkpointing is True and (spare is None or spare > 0.5):
        told.append(
            "gradient_checkpointing=false saves the recomputation, about a quarter of the update, and the "
            "memory for it seems to be there."
        )
    elif idle > 0.25:
        told.append(
            f"In the update the device is idle {100 * idle:.0f} % of the time: larger micro-batches "
            "(micro_batch_tokens) leave fewer gaps."
        )
    parts = found.spent.parts
    optimiser = parts.get("optimiser", 0.0) / (sum(parts.values()) or 1.0)
    if optimiser > 0.2:
        told.append(
            f"The optimiser is {100 * optimiser:.0f} % of the update, whatever the batch: more tokens a step "
            "(prompts_per_step) make it count for less."
        )
    prepare = parts.get("prepare", 0.0) / (sum(parts.values()) or 1.0)
    if prepare > 0.15:
        told.append(
            f"Passes without gradients (reference, old logprobs) are {100 * prepare:.0f} % of the update: "
            "beta=0 and one update per batch need none."
        )
    return told


def draw(found: Profile, path: Path) -> None:
    """Two bars, rollout and update, each by kind."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style: Mapping[Any, Any] = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    stages = [stage for stage in ("update", "rollout") if stage in found.spent.kinds]
    with matplotlib.rc_context(dict(style)):
        figure = Figure(figsize=(9, 2.2), layout="constrained")
        axes = figure.subplots()
        for place, stage in enumerate(stages):
            left = 0.0
            for kind in KINDS:
                seconds = found.spent.kinds[stage].get(kind, 0.0)
                label = kind if place == 0 else None
                axes.barh(place, seconds, 0.6, left=left, color=COLOURS[kind], label=label)
                left += seconds
        axes.set_yticks(range(len(stages)), stages)
        axes.set_xlabel("seconds, of one step under the profiler")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=5, frameon=False, fontsize=8)
        FigureCanvasAgg(figure).print_figure(path, dpi=120, format="png")
