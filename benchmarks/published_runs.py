"""Steps of other trainers as they were published, beside the event model with their settings.

python -m benchmarks.published_runs

Only figures that their pages give. What a page lacks is assumed here and said in docs/lab/scale.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.cluster.layouts import SERVER_RESERVED
from benchmarks.cluster.simulation import Result, Stages, draw_batches, simulate
from benchmarks.cluster.stages import gather_seconds, vllm_engines
from whetstone.cost.chips import find_chip
from whetstone.cost.shape import model_shape
from whetstone.cost.step import Layout, Work, update_seconds
from whetstone.cost.timing import chip_machine

# Spread of the logarithm of lengths, and whether vLLM's host works while the GPU computes (async scheduling).
# The first is what whet plan has; whether these runs had it on is not said.
WAYS = ((0.5, True), (0.5, False), (1.0, False))


@dataclass(frozen=True, kw_only=True)
class Published:
    """A step of `step_s` seconds. `sampling_gpus` 0: all GPUs sample, then train."""

    name: str
    chip: str
    model: str
    prompts: int
    group: int
    prompt_tokens: int
    tokens: int  # mean of completions
    longest: int
    training_gpus: int
    sampling_gpus: int = 0
    engine_tp: int = 1
    tp: int = 1
    replicas: int = 1
    checkpointing: bool = True
    passes: int  # without gradients: old and reference logprobs
    memory_share: float  # of vLLM
    step_s: float
    stages: tuple[float, float] | None = None  # sampling; update with its passes

    @property
    def gpus(self) -> int:
        return self.training_gpus + self.sampling_gpus


# NeMo RL 0.4, "Performance": docs/about/performance-summary.md of NVIDIA-NeMo/RL, H100, Megatron, vLLM,
# GRPO on OpenMathInstruct-2. Completions by "G-Average Seq len"; prompts by tokens/s, which count them. The
# recipes name the rest: 64 x 32, KL to a reference, memory of vLLM, checkpointing. Pipelines are taken as
# shards.
LLAMA = Published(
    name="NeMo RL, Llama-3.1-8B",
    chip="H100",
    model="meta-llama/Llama-3.1-8B-Instruct",
    prompts=64,
    group=32,
    prompt_tokens=130,
    tokens=1060,
    longest=3966,
    training_gpus=16,
    passes=2,
    memory_share=0.6,
    step_s=97.7,
)
QWEN = replace(
    LLAMA,
    name="NeMo RL, Qwen3-32B",
    model="Qwen/Qwen3-32B",
    prompt_tokens=110,
    tokens=3206,
    longest=3986,
    training_gpus=32,
    engine_tp=4,
    tp=4,
    checkpointing=False,
    step_s=393,
)
# verl, "One Step Off Policy Async Trainer" (2025-07-17) and "Fully Async Policy Trainer" (2025-10-18):
# docs/advance of volcengine/verl, H20, FSDP2, vLLM, DAPO with Qwen2.5-Math-7B. Mean lengths are not given:
# those with which the update of the first row takes what was published.
VERL = Published(
    name="verl, 7B",
    chip="H20",
    model="Qwen/Qwen2.5-Math-7B",
    prompts=512,
    group=16,
    prompt_tokens=150,
    tokens=650,
    longest=20480,
    training_gpus=16,
    replicas=2,
    engine_tp=4,
    passes=1,
    memory_share=0.8,
    step_s=749,
    stages=(321, 374),
)
LONGER = replace(VERL, name="verl, 7B, longer", tokens=1600, longest=28672)
AHEAD = "the same, one step off"
NEMO_RUNS = (
    LLAMA,
    replace(LLAMA, name=AHEAD, tokens=1129, training_gpus=8, sampling_gpus=8, memory_share=0.8, step_s=74.6),
    QWEN,
    replace(QWEN, name=AHEAD, tokens=3207, sampling_gpus=32, memory_share=0.8, step_s=215),
)
VERL_RUNS = (
    VERL,
    replace(VERL, name=AHEAD, training_gpus=12, sampling_gpus=4, replicas=1, step_s=520, stages=(458, 445)),
    replace(LONGER, training_gpus=32, replicas=4, step_s=790.1, stages=(357.4, 421.5)),
    replace(LONGER, training_gpus=64, replicas=8, step_s=365.3, stages=(150.7, 203.7)),
    replace(LONGER, training_gpus=128, replicas=16, step_s=356.3, stages=(177.9, 167.7)),
)


def computed(run: Published, spread: float, is_overlapped: bool) -> tuple[Result, Stages]:
    """A step by the event model, both modes with vLLM; weights are broadcast to all engines at once."""
    chip = find_chip(run.chip)
    assert chip is not None
    machine, shape = chip_machine(chip), model_shape(run.model)
    layout = Layout(gpus=run.training_gpus, tp=run.tp, replicas=run.replicas)
    room = run.memory_share * machine.memory - SERVER_RESERVED - 2 * shape.parameters / run.engine_tp
    slots = room / ((run.prompt_tokens + run.tokens) * shape.kv_bytes / run.engine_tp)
    # Each completion is run with its prompt.
    work = Work(
        prompts=run.prompts * run.group,
        group=1,
        prompt_tokens=run.prompt_tokens,
        new_tokens=run.tokens,
        micro_batch_tokens=16384,
        checkpointing=run.checkpointing,
    )
    forward = 2 / (8 if run.checkpointing else 6)
    weights = 2.0 * shape.parameters
    transfer = gather_seconds(machine, weights, layout)
    kind = vllm_engines(
        machine,
        shape,
        Layout(gpus=run.engine_tp, tp=run.engine_tp),
        number=(run.sampling_gpus or run.training_gpus) // run.engine_tp,
        slots=min(1024, int(slots)),
        prompt_tokens=run.prompt_tokens,
    )
    in_turn = replace(kind, step_s=lambda number: kind.step_s(number) + kind.host_s(number))
    stages = Stages(
        engines=kind if is_overlapped else in_turn,
        transfer_s=transfer + (weights / machine.far_link if run.sampling_gpus else 0.0),
        exchange_s=0.0,
        update_s=(1 + run.passes * forward) * update_seconds(machine, shape, work, layout),
        is_colocated=not run.sampling_gpus,
        is_ahead=run.sampling_gpus > 0,
    )
    batches = draw_batches(
        prompts=run.prompts, group=run.group, mean=run.tokens, longest=run.longest, spread=spread
    )
    return simulate(stages, batches), stages


def published_rows(runs: Sequence[Published]) -> list[str]:
    """Rows of a table: seconds of the step, and of sampling / update, published and by each of `WAYS`."""
    rows = []
    for run in runs:
        gpus = f"{run.training_gpus} + {run.sampling_gpus}" if run.sampling_gpus else f"{run.training_gpus}"
        cells = [run.name, gpus, f"{run.tokens:,}", f"{run.step_s:.0f}"]
        cells.append("" if run.stages is None else " / ".join(f"{seconds:.0f}" for seconds in run.stages))
        for way in WAYS:
            result, stages = computed(run, *way)
            cells.append(f"{result.step_s:.0f} ({result.step_s / run.step_s:.2f})")
            cells.append(f"{result.rollout_s:.0f} / {stages.update_s:.0f}")
        rows.append(f"| {' | '.join(cells)} |")
    return rows


if __name__ == "__main__":
    print("| run | GPUs | tokens | published s | stages | computed | stages ", end="")
    print(f"| host in turn | stages | spread 1 | stages |\n|{'---|' * 11}")
    print("\n".join(published_rows((*NEMO_RUNS, *VERL_RUNS))))
