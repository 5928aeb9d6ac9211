"""The cost model of `whet plan` beside what was measured, and the tables of docs/scale.md and its lab notes.

python -m benchmarks.cost_tables
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.cluster.layouts import Job, Placement, Row, make_job, scale_rows, with_servers
from benchmarks.cluster.simulation import Engines, Stages, simulate
from benchmarks.cluster.stages import vllm_engines
from benchmarks.rollout_work import Work as RolloutWork
from whetstone.config import build
from whetstone.cost.estimate import MAX_FITTING_SHARE
from whetstone.cost.memory import MemoryPlan, Setup, memory_plan
from whetstone.cost.prompts import Prompts
from whetstone.cost.shape import ModelShape, model_shape
from whetstone.cost.step import (
    H200,
    LAYER_S,
    Layout,
    Work,
    cache_seconds,
    decode_step,
    uncached_step,
    update_seconds,
)

NAMES = {size: f"Qwen/Qwen2.5-{size}" for size in ("0.5B", "1.5B", "3B", "7B", "14B", "32B")}
NAMES["70B"] = "meta-llama/Llama-3.1-70B"
H200_BYTES = 150e9  # a process can have
SLOWER = 1.5
# The works of benchmarks/rollout.py and update.py; the update's with 73,765 tokens to run.
BENCH = Work(prompts=32, group=8, prompt_tokens=192, new_tokens=512, checkpointing=False)
RAGGED = Work(
    prompts=32, group=8, prompt_tokens=192, new_tokens=264, checkpointing=False, micro_batch_tokens=16384
)
ONE = Layout(gpus=1)
FITTED = {("decode", "1.5B", 256), ("decode", "1.5B", 1024), ("vllm", "1.5B", 256)}
FITTED |= {("update", "1.5B", 256), ("update", "3B", 256)}
# What was measured: one H200, 2026-11-15 and 16, torch 2.11, benchmarks/results/{rollout,update,step}.json.
# (The rollouts of the native engine at 0.5B there are of slower kernels.)
MEASURED = {
    ("decode", "1.5B", 256): 102_270, ("decode", "1.5B", 1024): 124_968,
    ("decode", "3B", 256): 60_032, ("decode", "3B", 1024): 71_819,
    ("ragged", "1.5B", 256): 0.952, ("ragged", "1.5B", 1024): 2.096,
    ("ragged", "3B", 256): 1.598, ("ragged", "3B", 1024): 3.625,
    ("vllm", "1.5B", 256): 6.017, ("vllm", "1.5B", 1024): 24.034,
    ("vllm", "3B", 256): 6.876, ("vllm", "3B", 1024): 24.231,
    ("ragged vllm", "1.5B", 256): 3.494, ("ragged vllm", "1.5B", 1024): 10.964,
    ("ragged vllm", "3B", 256): 3.543, ("ragged vllm", "3B", 1024): 10.018,
    ("update", "0.5B", 256): 104_114, ("update", "1.5B", 256): 48_712, ("update", "3B", 256): 27_184,
    ("memory", "0.5B", 256): 26.5, ("memory", "1.5B", 256): 61.3, ("memory", "3B", 256): 106.9,
    ("step", "1.5B", 256): 4.41,
}  # fmt: skip
LABELS = {
    "decode": "sampled tokens/s, {} sequences, native engine",
    "ragged": "seconds of {} sequences of lognormal lengths, native engine, simulated",
    "vllm": "seconds of {} sequences of 512 tokens, vLLM, simulated",
    "ragged vllm": "seconds of {} sequences of lognormal lengths, vLLM, simulated",
    "update": "tokens run/s in the update, no checkpointing",
    "memory": "GB at the peak of that update",
    "step": "seconds of a whole step, 32 prompts x 8 x 512, simulated",
}


@functools.cache
def shape_of_size(size: str) -> ModelShape:
    return model_shape(NAMES[size])


@functools.cache
def predicted(what: str, size: str, sequences: int) -> float:
    """The prediction for a measurement."""
    shape = shape_of_size(size)
    if what == "decode":
        return sequences / decode_step(H200, shape, BENCH, ONE, sequences)
    if what == "update":
        return RAGGED.update_tokens / update_seconds(H200, shape, RAGGED, ONE)
    if what == "memory":
        return sum(_memory(shape, _setup(checkpointing=False)).update.values()) / 1e9
    is_vllm, kind = what.endswith("vllm"), "ragged" if what.startswith("ragged") else "full"
    update = update_seconds(H200, shape, BENCH, ONE) + H200.update_s if what == "step" else 0.0
    return simulated_seconds(shape, RolloutWork(size.lower(), sequences, kind), is_vllm=is_vllm) + update


def simulated_seconds(shape: ModelShape, work: RolloutWork, *, is_vllm: bool) -> float:
    """Sampling alone, with the lengths of the benchmark."""
    lengths = work.lengths()
    groups = [lengths[start : start + work.group] for start in range(0, len(lengths), work.group)]
    if is_vllm:
        engines = vllm_engines(H200, shape, ONE, number=1, slots=256, prompt_tokens=BENCH.prompt_tokens)
    else:
        engines = Engines(
            number=1,
            slots=1024,
            step_s=lambda number: uncached_step(H200, shape, ONE, number),
            cache_token_s=cache_seconds(H200, shape, ONE),
            prompt_tokens=BENCH.prompt_tokens,
        )
    stages = Stages(engines=engines, transfer_s=0.0, exchange_s=0.0, update_s=0.0)
    return simulate(stages, [groups, groups]).rollout_s


def measured() -> list[tuple[str, float, float]]:
    """Predictions beside measurements."""
    rows = []
    for key, seen in MEASURED.items():
        what, size, sequences = key
        label = f"{size}: {LABELS[what].format(f'{sequences:,}')} "
        label += "(fitted)" if key in FITTED else "(predicted)"
        rows.append((label, predicted(what, size, sequences), seen))
    return rows


# The layouts that docs/scale.md suggests to start with, and the model each is for.
SUGGESTED = (
    ("1.5B", Layout(gpus=1)),
    ("3B", Layout(gpus=1)),
    ("3B", Layout(gpus=4)),
    ("7B", Layout(gpus=4)),
    ("7B", Layout(gpus=8)),
    ("14B", Layout(gpus=8)),
    ("14B", Layout(gpus=8, tp=2)),
    ("32B", Layout(gpus=16, tp=2)),
    ("32B", Layout(gpus=16, tp=4)),
    ("70B", Layout(gpus=32, tp=8)),
    ("70B", Layout(gpus=64, tp=8)),
)


def _setup(layout: Layout = ONE, *, checkpointing: bool = True, **changes: object) -> Setup:
    """Full training with micro-batches of 16,384 tokens."""
    config = {"bf16": True, "prompts_per_step": 128, "num_generations": 8, "max_completion_length": 2048}
    setup = job_of("1.5B", tokens=2048, **config).setup
    changes |= {"gpus": layout.gpus, "tp": layout.tp, "replicas": layout.replicas}
    return replace(setup, checkpointing=checkpointing, micro_batch_tokens=16384, **changes)  # pyright: ignore


def _memory(shape: ModelShape, setup: Setup, capacity: float = H200_BYTES) -> MemoryPlan:
    return memory_plan(shape, setup, capacity)


def memory_rows() -> list[str]:
    """Rows of a table: GB on each GPU in the update, in the layouts of `SUGGESTED`.

    The columns: as it is, `optim: adamw_8bit`, `cpu_offload: optimizer`, and which GPUs hold the first.
    """
    rows = []
    for size, layout in SUGGESTED:
        shape, setup = shape_of_size(size), _setup(layout)
        ways = (setup, replace(setup, optim="adamw_8bit"), replace(setup, offload=True))
        needs = [sum(_memory(shape, way).update.values()) / 1e9 for way in ways]
        fits = [gb for gb in (80, 141) if _memory(shape, setup, MAX_FITTING_SHARE * gb * 1e9).fits]
        gpus = f"{layout.gpus}" if layout.tp == 1 else f"{layout.gpus}, `tp_size: {layout.tp}`"
        figures = " | ".join(f"{need:.0f}" for need in needs)
        rows.append(f"| {size} | {gpus} | {figures} | {', '.join(map(str, fits)) or 'neither'} |")
    return rows


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """A run of docs/lab/scale.md on H200s."""

    size: str
    prompts: int
    group: int
    tokens: int
    longest: int
    gpus: tuple[int, ...]


SCALINGS = (
    Scaling(size="1.5B", prompts=128, group=8, tokens=1000, longest=4096, gpus=(1, 8, 64)),
    Scaling(size="7B", prompts=128, group=8, tokens=3000, longest=8192, gpus=(8, 16, 64, 256)),
    Scaling(size="14B", prompts=128, group=16, tokens=5000, longest=16384, gpus=(8, 64, 256)),
    Scaling(size="32B", prompts=128, group=16, tokens=5000, longest=16384, gpus=(8, 64, 256, 1024)),
    Scaling(size="70B", prompts=128, group=16, tokens=3000, longest=8192, gpus=(16, 256, 4096)),
)


def job_of(size: str, *, tokens: float, **settings: object) -> Job:
    config = build({"bf16": True, "max_steps": 1, "model_name_or_path": NAMES[size], **settings})
    prompts = Prompts(tokens=256, num_problems=10_000, source="")
    return make_job(config, shape_of_size(size), prompts, machine=H200, capacity=H200_BYTES, tokens=tokens)


def scaling_rows(scaling: Scaling) -> list[str]:
    job = job_of(
        scaling.size,
        tokens=scaling.tokens,
        prompts_per_step=scaling.prompts,
        num_generations=scaling.group,
        max_completion_length=scaling.longest,
    )
    return [_scaling_row(job, row) for row in scale_rows(job, scaling.gpus)]


def _slower_servers(stages: Stages) -> Stages:
    """Servers that take `SLOWER` times as long: vLLM was measured up to 3B only."""
    kind = stages.engines
    engines = replace(
        kind,
        step_s=lambda number: SLOWER * kind.step_s(number),
        host_s=lambda number: SLOWER * kind.host_s(number),
        cache_token_s=SLOWER * kind.cache_token_s,
    )
    return replace(stages, engines=engines)


def _scaling_row(job: Job, row: Row) -> str:
    cells = [f"{row.gpus:,}", *_placement_cells(row.colocated), *_placement_cells(row.one_step_off)]
    ratios = ""
    if row.colocated is not None and row.one_step_off is not None:
        slower = simulate(_slower_servers(row.one_step_off.stages), job.batches)
        faster = with_servers(replace(job, server_layer_s=LAYER_S), row.gpus)
        assert faster is not None
        steps = (row.one_step_off.result.step_s, slower.step_s, faster.result.step_s)
        ratios = ", ".join(f"{seconds / row.colocated.result.step_s:.2f}" for seconds in steps)
    return f"| {' | '.join((*cells, ratios))} |"


def _placement_cells(placement: Placement | None) -> list[str]:
    """Layout; seconds of sampling, update, transfer and step; idle share; tokens/s of a GPU."""
    if placement is None:
        return ["", "", "", ""]
    layout, stages, result = placement.layout, placement.stages, placement.result
    shape = f"{layout.replicas} x {layout.shards} x {layout.tp}"
    idle = f"{100 * result.trainer_idle:.0f}"
    if placement.servers:
        shape += f" + {placement.servers} x {placement.server_tp}"
        idle += f", {100 * result.sampler_idle:.0f}"
    seconds = f"{result.rollout_s:.1f} / {stages.update_s:.1f} / {stages.transfer_s:.1f}"
    return [shape, seconds, f"{result.step_s:.1f}", f"{idle} %"]


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def main(scalings: Sequence[Scaling] = SCALINGS) -> None:
    print("| what | computed | measured | ratio |\n|---|---|---|---|")
    for what, computed, seen in measured():
        print(f"| {what} | {_figure(computed)} | {_figure(seen)} | {computed / seen:.2f} |")
    print("\n| model | GPUs | GB | `adamw_8bit` | `cpu_offload: optimizer` | fits into GB |")
    print("|---|---|---|---|---|---|")
    print("\n".join(memory_rows()))
    head = "| GPUs | colocated | sampling / update / weights s | step s | idle "
    head += "| one step off | sampling / update / weights s | step s | idle: ranks, servers "
    head += "| ratio: computed, slower servers, faster split layers |"
    for scaling in scalings:
        work = f"{scaling.prompts} prompts x {scaling.group} completions of {scaling.tokens:,} tokens"
        print(f"\n{scaling.size}: {work} on average, at most {scaling.longest:,}\n\n{head}\n|{'---|' * 10}")
        print("\n".join(scaling_rows(scaling)))


if __name__ == "__main__":
    main()
