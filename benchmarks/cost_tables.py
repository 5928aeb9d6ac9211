"""The cost model of `whet plan` beside what was measured, and the tables of docs/scale.md.

python benchmarks/cost_tables.py
"""

from dataclasses import replace

from whetstone.cost.step import (
    H200,
    MODELS,
    Layout,
    Work,
    decode_step,
    memory,
    predict,
    update_seconds,
)

# The works of benchmarks/rollout.py and update.py; the update's with 73,765 tokens to run.
BENCH = Work(prompts=32, group=8, prompt_tokens=192, new_tokens=512, checkpointing=False)
RAGGED = Work(
    prompts=32, group=8, prompt_tokens=192, new_tokens=264, checkpointing=False, micro_batch_tokens=16384
)
ONE = Layout(gpus=1)
FITTED = {("decode", "1.5B", 256), ("decode", "1.5B", 1024)}
FITTED |= {("update", "1.5B", 256), ("update", "3B", 256), ("memory", "1.5B", 256)}
# What was measured: one H200, 2026-11-15 and 16, torch 2.11, benchmarks/results/{rollout,update,step}.json.
# (The rollouts of 0.5B there are of an engine with slower kernels.)
MEASURED = {
    ("decode", "1.5B", 256): 102_270, ("decode", "1.5B", 1024): 124_968,
    ("decode", "3B", 256): 60_032, ("decode", "3B", 1024): 71_819,
    ("update", "0.5B", 256): 104_114, ("update", "1.5B", 256): 48_712, ("update", "3B", 256): 27_184,
    ("memory", "0.5B", 256): 26.5, ("memory", "1.5B", 256): 61.3, ("memory", "3B", 256): 106.9,
    ("step", "1.5B", 256): 4.41,
}  # fmt: skip
LABELS = {
    "decode": "sampled tokens/s, {} sequences, native engine",
    "update": "tokens run/s in the update, no checkpointing",
    "memory": "GB at the peak of that update",
    "step": "seconds of a whole step, 32 prompts x 8 x 512",
}


def predicted(what: str, name: str, sequences: int) -> float:
    """The prediction for a measurement."""
    model = MODELS[name]
    decode = sequences / decode_step(H200, model, BENCH, ONE, sequences)
    if what == "decode":
        return decode
    if what == "update":
        return RAGGED.update_tokens / update_seconds(H200, model, RAGGED, ONE)
    if what == "memory":
        return memory(model, RAGGED, ONE) / 1e9
    sampled = sequences * BENCH.new_tokens
    return sampled / decode + update_seconds(H200, model, BENCH, ONE)


def measured() -> list[tuple[str, float, float]]:
    """Predictions beside measurements."""
    rows = []
    for key, seen in MEASURED.items():
        what, name, sequences = key
        label = f"{name}: {LABELS[what].format(f'{sequences:,}')} "
        label += "(fitted)" if key in FITTED else "(predicted)"
        rows.append((label, predicted(what, name, sequences), seen))
    return rows


def scaling(model: str, work: Work, layouts: list[Layout]) -> list[str]:
    """Rows of a table: one layout each."""
    rows = []
    for layout in layouts:
        cost = predict(H200, MODELS[model], work, layout)
        shape = f"{layout.replicas} x {layout.shards} x {layout.tp}"
        fits = "" if cost.memory < 0.9 * H200.memory else " (too much)"
        rows.append(
            f"| {layout.gpus:,} | {shape} | {cost.rollout_s:.1f} | {cost.exchange_s:.1f} "
            f"| {cost.update_s:.1f} | {cost.gather_s:.2f} | {cost.step_s:.1f} | {cost.tokens_per_s:,.0f} | "
            f"{cost.tokens_per_s / layout.gpus:,.0f} | {cost.memory / 1e9:.0f}{fits} |"
        )
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


def memory_rows() -> list[str]:
    """Rows of a table: GB on each GPU for full training, in the layouts of `SUGGESTED`.

    The columns: as it is, `optim: adamw_8bit`, `cpu_offload: optimizer`, and which GPUs hold the first.
    """
    work = Work(prompts=128, group=8, prompt_tokens=256, new_tokens=2048)
    rows = []
    for name, layout in SUGGESTED:
        ways = (layout, replace(layout, optim="adamw_8bit"), replace(layout, offload=True))
        needs = [memory(MODELS[name], work, way) / 1e9 for way in ways]
        fits = [str(size) for size in (80, 141) if needs[0] < 0.9 * size]
        shape = f"{layout.gpus}" if layout.tp == 1 else f"{layout.gpus}, `tp_size: {layout.tp}`"
        figures = " | ".join(f"{need:.0f}" for need in needs)
        rows.append(f"| {name} | {shape} | {figures} | {', '.join(fits) or 'neither'} |")
    return rows


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def main() -> None:
    print("| what | computed | measured | ratio |\n|---|---|---|---|")
    for what, computed, seen in measured():
        print(f"| {what} | {_figure(computed)} | {_figure(seen)} | {computed / seen:.2f} |")
    print("\n| model | GPUs | GB | `adamw_8bit` | `cpu_offload: optimizer` | fits into GB |")
    print("|---|---|---|---|---|---|")
    print("\n".join(memory_rows()))
    head = "\n| GPUs | replicas x shards x tp | rollout s | exchange s | update s | gather s | step s "
    head += "| tokens/s | per GPU | GB |"
    for name, prompts, layouts in (
        ("1.5B", 128, [Layout(gpus=n) for n in (1, 2, 4, 8)]),
        ("7B", 256, [Layout(gpus=8), *(Layout(gpus=n, replicas=n // 8) for n in (16, 64))]),
        ("32B", 512, [Layout(gpus=16, tp=2), Layout(gpus=64, tp=4, replicas=4)]),
        ("70B", 1024, [Layout(gpus=n, tp=8, replicas=max(1, n // 64)) for n in (32, 64, 256, 1024)]),
    ):
        work = Work(prompts=prompts, group=8, prompt_tokens=256, new_tokens=2048)
        print(f"\n{name}: {prompts} prompts x 8 completions of 2,048 tokens a step{head}\n|{'---|' * 10}")
        print("\n".join(scaling(name, work, layouts)))


if __name__ == "__main__":
    main()
