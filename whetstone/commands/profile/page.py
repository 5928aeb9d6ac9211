"""The one page of `whet profile`: tables in Markdown, and what to try, if anything."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from whetstone.commands.profile.trace import IDLE, KINDS, TimeBreakdown
from whetstone.config import Config
from whetstone.config.engine_traits import engine_traits
from whetstone.files import atomic_write
from whetstone.terminal.text import counted, cut

STAGES = ("weight_sync", "rollout", "reward_wait", "update")
PARTS = ("prepare", "forward", "head", "backward", "optimizer", "other")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The content of the page."""

    name: str
    date: str
    model: str  # a description
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
        """Shares of a stage's seconds by kind."""
        seconds = self.spent.kinds.get(stage, {})
        total = sum(seconds.values()) or 1.0
        return {kind: seconds.get(kind, 0.0) / total for kind in KINDS}

    def part(self, name: str) -> float:
        """The share of a part in the update."""
        return self.spent.parts.get(name, 0.0) / (sum(self.spent.parts.values()) or 1.0)


def write_page(profile: Profile, path: Path, *, trace: str) -> str:
    first = advice(profile)
    text = "\n\n".join(
        [
            f"# Profile of {profile.name}",
            f"{profile.date}, {profile.device}. {profile.model}.",
            _speed(profile),
            "## Where a step's time goes",
            _stages(profile),
            "## What it is spent on",
            _kinds(profile),
            "## The update's parts",
            _parts(profile),
            f"## The longest {'kernels' if profile.spent.on_gpu else 'operators'}",
            _longest(profile),
            *([f"**Try first:** {first}"] if first else []),
            f"`{trace}` opens in ui.perfetto.dev or chrome://tracing; our own ranges begin with `whet:`.",
        ]
    )
    atomic_write(path, text + "\n")
    return text


def _table(heads: list[str], rows: list[list[str]], note: str) -> str:
    lines = [heads, ["---", *["--:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines) + f"\n\n{note}".rstrip()


def _speed(profile: Profile) -> str:
    text = (
        f"**{profile.mean('step_time'):.2f} s a step**: {profile.mean('rollout_tokens_per_s'):,.0f} tokens/s "
        f"sampled, {profile.mean('update_tokens_per_s'):,.0f} tokens/s in the update"
    )
    if profile.peak_flops is not None:
        peak = profile.peak_flops / 1e12
        text += f", which is {100 * profile.mean('mfu'):.1f} % of {peak:,.4g} TFLOP/s (MFU, 6 N per token)"
    return f"{text}. Peak memory {max(profile.peak_gb(s) for s in ('rollout', 'update')):.2f} GB."


def _stages(profile: Profile) -> str:
    whole = profile.mean("step_time")
    seconds = {stage: profile.mean(f"time/{stage}") for stage in STAGES}
    peaks = {stage: f"{profile.peak_gb(stage):.2f}" for stage in profile.peaks_gb[0]}
    seconds["the rest"] = whole - sum(seconds.values())
    rows = [
        [stage, f"{value:.3f}", f"{100 * value / whole:.1f} %", peaks.get(stage, "")]
        for stage, value in seconds.items()
    ]
    note = (
        f"Means of {counted(len(profile.rows), 'step')} after one to warm up, without profiler. reward_wait: "
        "waiting for scores after the last sample; weight_sync: weights on their way to the engine. The "
        "rollout's peak is of all three."
    )
    return _table(["stage", "seconds", "share", "peak GB"], rows, note)


def _kinds(profile: Profile) -> str:
    stages = [stage for stage in ("rollout", "update") if stage in profile.spent.kinds]
    rows = []
    for kind in KINDS:
        seconds = {stage: profile.spent.kinds[stage].get(kind, 0.0) for stage in stages}
        if any(seconds.values()):
            cells = [f"{value:.3f} ({100 * profile.kinds(s)[kind]:.0f} %)" for s, value in seconds.items()]
            rows.append([kind, *cells])
    on_gpu = profile.spent.on_gpu
    what = "kernels and copies" if on_gpu else "operators, each without those inside it"
    idle = "the device waited for the host" if on_gpu else "Python ran between operators, or waited"
    note = (
        f"Seconds of one step of {profile.profiled['step_time']:.2f} s under the profiler, by {what}; idle: "
        f"{idle}. The rollout includes reward_wait and weight_sync."
    )
    return _table(["", *stages], rows, note)


def _parts(profile: Profile) -> str:
    rows = [
        [part, f"{profile.spent.parts[part]:.3f}", f"{100 * profile.part(part):.0f} %"]
        for part in PARTS
        if profile.part(part) > 0
    ]
    note = (
        "Prepare is what runs before the first gradient (old logprobs, reference, values); the head's own "
        "backward pass is in backward."
    )
    return _table(["part", "seconds", "share"], rows, note)


def _longest(profile: Profile) -> str:
    rows = []
    for kind, name, calls, seconds in profile.spent.longest:
        name = name.replace("|", "/").replace("`", "'").removeprefix("void ")
        rows.append([f"`{cut(name, 70)}`", kind, f"{calls:,}", f"{seconds:.3f}"])
    return _table(["name", "kind", "calls", "seconds"], rows, "")


def advice(profile: Profile) -> str | None:
    """The setting to try first, with the number that speaks for it; None where nothing stands out."""
    hints: list[tuple[float, str]] = []  # share of a step that it is about
    for stage, find in (("rollout", _of_rollout), ("update", _of_update)):
        if profile.share(stage) > 0.3:
            hints += [(profile.share(stage), sentence) for sentence in find(profile)]
    for stage, remedy in (
        ("reward_wait", "more reward_workers, or a faster reward function."),
        ("weight_sync", "rollout_engine=native needs none; else weight_transfer by nccl or ipc."),
    ):
        share = profile.share(stage)
        if share > 0.15:
            hints.append((share, f"{stage} takes {100 * share:.0f} % of a step: {remedy}"))
    return max(hints, key=lambda hint: hint[0])[1] if hints else None


def _of_rollout(profile: Profile) -> Iterator[str]:
    config, idle = profile.config.rollout, profile.kinds("rollout")[IDLE]
    if engine_traits(config.rollout_engine).uses_attn_implementation:
        yield "rollout_engine=native samples faster than transformers' generate."
    if idle > 0.4:
        yield (
            f"In the rollout the device is idle {100 * idle:.0f} % of the time: more sequences at once "
            "(prompts_per_step, num_generations) cost little more."
        )
    if profile.share("rollout") > 0.5 and profile.spent.on_gpu and config.async_rollouts == 0:
        yield "async_rollouts=1 samples the next batch while the update learns from this one."


def _of_update(profile: Profile) -> Iterator[str]:
    idle = profile.kinds("update")[IDLE]
    spare = None if profile.memory_gb is None else 1 - profile.peak_gb("update") / profile.memory_gb
    if profile.config.model.gradient_checkpointing is True and (spare is None or spare > 0.5):
        yield (
            "gradient_checkpointing=false saves the recomputation, about a quarter of the update, and the "
            "memory for it seems to be there."
        )
    elif idle > 0.25:
        yield (
            f"In the update the device is idle {100 * idle:.0f} % of the time: larger micro-batches "
            "(micro_batch_tokens) leave fewer gaps."
        )
    if profile.part("optimizer") > 0.2:
        yield (
            f"The optimizer is {100 * profile.part('optimizer'):.0f} % of the update, whatever the batch: "
            "more tokens a step (prompts_per_step) make it count for less."
        )
    if profile.part("prepare") > 0.15:
        yield (
            f"Passes without gradients (reference, old logprobs) are {100 * profile.part('prepare'):.0f} % "
            "of the update: beta=0 and one update per batch need none."
        )
