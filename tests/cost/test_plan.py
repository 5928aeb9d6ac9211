"""Memory and time by arithmetic, beside peaks and seconds that an H200 took (docs/lab/plan.md)."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from whetstone.config import build, flatten, load, make_plan
from whetstone.cost import memory
from whetstone.cost.chips import find_chip
from whetstone.cost.estimate import changes, estimate, smallest_change
from whetstone.cost.memory import (
    BUCKETS,
    MemoryPlan,
    Setup,
    activation_bytes,
    memory_plan,
    setup_of,
    state_bytes,
)
from whetstone.cost.prompts import Prompts, look_at_prompts
from whetstone.cost.shape import ModelShape, model_shape
from whetstone.cost.step import Layout, Work, prefill_seconds
from whetstone.cost.timing import TimePlan, chip_machine, machine_of, rollout_seconds, time_plan
from whetstone.engines.native import SLOTS_ON_GPU, gpu, slot_state
from whetstone.update import micro_batch_size

PROMPTS = Prompts(tokens=130, num_problems=7473, source="")
H200_BYTES = 150e9
H200 = find_chip("NVIDIA H200")


@pytest.fixture(scope="module")
def qwen() -> ModelShape:
    """Qwen2.5-Coder-1.5B as it was measured: with an output matrix of its own."""
    shape = model_shape("Qwen/Qwen2.5-Coder-1.5B-Instruct")
    return replace(shape, parameters=shape.parameters + shape.vocabulary * shape.hidden)


def planned(shape: ModelShape, recipe: str, words: list[str], tokens: float) -> tuple[MemoryPlan, TimePlan]:
    assert H200 is not None
    config = load(recipe, words).config
    plan = make_plan(config, num_problems=7473)
    setup = setup_of(config, plan, prompt_tokens=130)
    memory = memory_plan(shape, setup, H200_BYTES)
    return memory, time_plan(shape, setup, memory, chip_machine(H200), config, plan, tokens)


# Recipe, settings, mean length; measured: peak GB, seconds of sampling and update, share of prompts whose
# completions all earned the same and were left out of the update.
MEASURED = [
    ("gsm8k", [], 308, 65.1, 2.70, 5.64, 0.12),
    ("gsm8k", ["num_generations=8"], 308, 65.1, 1.65, 2.41, 0.29),
    ("gsm8k", ["num_generations=8", "use_peft=true"], 306, 61.5, 1.87, 1.97, 0.19),
    ("six_tasks", [], 200, 65.1, 1.05, 1.22, 0.03),
    ("six_tasks", ["use_peft=true", "beta=0.01"], 214, 61.5, 1.05, 1.21, 0.0),
    ("critic", [], 209, 65.0, 1.63, 2.61, 0.0),
    ("local_kl", [], 204, 65.1, 1.04, 2.74, 0.02),
]


@pytest.mark.parametrize(("recipe", "words", "tokens", "peak", "rollout", "update", "skipped"), MEASURED)
def test_plans_are_near_what_real_runs_took(
    qwen: ModelShape,
    recipe: str,
    words: list[str],
    tokens: float,
    peak: float,
    rollout: float,
    update: float,
    skipped: float,
) -> None:
    memory, seconds = planned(qwen, recipe, words, tokens)
    assert -0.05 < memory.peak / 1e9 / peak - 1 < 0.10
    assert seconds.rollout_s == pytest.approx(rollout, rel=0.20)
    assert seconds.update_s * (1 - skipped) == pytest.approx(update, rel=0.20)


def setup(**changes: object) -> Setup:
    config = build({"bf16": True, "num_generations": 8, "prompts_per_step": 32, "max_steps": 1})
    plan = make_plan(config, num_problems=100)
    return replace(setup_of(config, plan, prompt_tokens=100), **changes)  # pyright: ignore


@pytest.mark.parametrize(
    ("changes", "bytes_each"),
    [
        ({}, 2 + 2 + 8 + 4),  # upper halves, lower halves, moments, gradients
        ({"optim": "adamw_8bit"}, 2 + 2 + 2 + 8 / 256 + 4),
        ({"offload": True}, 2 + 4),
        ({"has_reference": True}, 16 + 2),
        ({"bytes_per_number": 4}, 4 + 8 + 4),
        ({"critic": "model"}, 16 + 16),
        ({"critic": "model", "bytes_per_number": 4}, 16 + 16),  # float32 weights have no lower halves
        ({"critic": "model", "offload": True}, 6 + 6),
        # shards, the copy to sample from or to send, and a layer twice
        ({"gpus": 4}, 16 / 4 + 2 + 2 * 2 / 28),
        ({"gpus": 4, "samples_here": False}, 16 / 4 + 2 + 2 * 2 / 28),
    ],
)
def test_bytes_of_a_trained_parameter(qwen: ModelShape, changes: dict, bytes_each: float) -> None:
    parts = state_bytes(qwen, setup(**changes), H200_BYTES)
    buckets = BUCKETS if changes.get("offload") else 0
    assert sum(parts.values()) == pytest.approx(bytes_each * qwen.parameters + buckets)


def test_constants_are_those_of_the_engine_and_of_the_search() -> None:
    assert (memory.SLOTS, memory.PAGE) == (SLOTS_ON_GPU, slot_state.PAGE)
    assert (memory.RESERVED, memory.CACHE_FRACTION) == (gpu.RESERVED_BYTES, gpu.MEMORY_FRACTION)
    own = (memory.MAX_TOKENS, memory.LORA_MAX_TOKENS, memory.TARGET_TOKENS, memory.CPU_TOKENS)
    search = micro_batch_size
    assert own == (search.MAX_TOKENS, search.LORA_MAX_TOKENS, search.TARGET_TOKENS, search.DEFAULT_TOKENS)
    assert memory.UPDATE_FRACTION == search.MEMORY_FRACTION


@pytest.mark.parametrize(
    ("words", "has_reference"),
    [
        (["beta=0"], False),
        (["beta=0.1"], True),
        (["beta=0.1", "kl_reference=rollout", "num_iterations=2"], False),
        (["beta=0.1", "use_peft=true"], False),
        (["beta=0.1", "use_peft=true", "kl_reference=moving"], True),
        (["beta=0.1", "use_peft=true", "sft_steps=5"], True),
    ],
)
def test_a_reference_of_its_own(words: list[str], has_reference: bool) -> None:
    config = load("six_tasks", words).config
    assert setup_of(config, make_plan(config, num_problems=9), prompt_tokens=9).has_reference == has_reference


def test_bytes_beneath_an_adapter(qwen: ModelShape) -> None:
    plain = state_bytes(qwen, setup(lora_r=16), H200_BYTES)
    assert plain["weights"] == 2 * qwen.parameters and plain["merged adapter"] == 2 * qwen.linear
    assert sum(plain[part] for part in ("adapter", "gradients", "optimizer states")) == 16 * 18_464_768
    assert "merged adapter" not in state_bytes(qwen, setup(lora_r=16), 8e9)  # on the fly
    four = state_bytes(qwen, setup(lora_r=16, load_in_4bit=True), H200_BYTES)
    assert four["weights"] == pytest.approx(2 * (qwen.parameters - qwen.linear) + 0.5625 * qwen.linear)
    assert "merged adapter" not in four


def test_adapter_saves_memory_by_recomputed_gated_mlp(qwen: ModelShape) -> None:
    def kept(shape: ModelShape, lora_r: int | None = None) -> float:
        return activation_bytes(shape, setup(lora_r=lora_r), 1000, 0)

    other = replace(qwen, is_silu_gated=False)
    assert kept(qwen, lora_r=16) < kept(qwen)
    assert kept(qwen) == kept(qwen, lora_r=128) == kept(other) == kept(other, lora_r=16)


def test_micro_batches_and_checkpointing_by_memory(qwen: ModelShape) -> None:
    plans = [memory_plan(qwen, setup(completion_tokens=512), size * 1e9) for size in (141, 80, 48, 40, 24)]
    assert [plan.fits for plan in plans] == [True, True, True, True, False]
    assert plans[0].tokens == 16384 and plans[0].checkpointed == 0
    assert all(a.tokens >= b.tokens for a, b in itertools.pairwise(plans))
    assert plans[3].tokens == 8192 and 0 < plans[3].checkpointed < qwen.layers
    for size, plan in zip((141, 80, 48, 40), plans[:4], strict=True):
        assert plan.peak < size * 1e9
    half, whole = (activation_bytes(qwen, setup(), tokens, 0) for tokens in (1000, 2000))
    assert whole == 2 * half


def test_every_suggested_change_fits_and_none_before_it_does() -> None:
    shape = model_shape("Qwen/Qwen2.5-7B-Instruct")
    config = build({"bf16": True, "max_steps": 1, "max_completion_length": 1024, "model_name_or_path": "x"})
    for size in (16, 24, 48, 80, 141):
        change = smallest_change(config, shape, PROMPTS, capacity=size * 1e9)
        order = list(changes(config))
        assert change is not None
        for earlier in order[: order.index(change)]:
            tried = build({**flatten(config), **earlier})
            assert not estimate(tried, shape, PROMPTS, capacity=size * 1e9).memory.fits
        fitting = build({**flatten(config), **change})
        assert estimate(fitting, shape, PROMPTS, capacity=size * 1e9).memory.fits
    assert smallest_change(config, shape, PROMPTS, capacity=141e9) == {}
    assert smallest_change(config, shape, PROMPTS, capacity=3e9) is None


def test_short_completions_take_less_time_and_waves_more(qwen: ModelShape) -> None:
    assert H200 is not None
    machine = chip_machine(H200)
    long, short = (rollout_seconds(qwen, setup(), machine, 256, tokens) for tokens in (512, 128))
    assert short < long
    few = rollout_seconds(qwen, setup(num_sequences=64), machine, 256, 512)
    assert long < few < 4 * long


def test_states_in_host_memory_take_their_time_on_the_bus(qwen: ModelShape) -> None:
    """10 bytes a parameter each way (docs/memory.md), in each of two optimizer steps, by 50 GB/s."""
    words = ["num_iterations=2", "micro_batch_tokens=4096", "gradient_checkpointing=true"]
    (_, here), (_, there) = (
        planned(qwen, "gsm8k", [*words, f"cpu_offload={offload}"], 300) for offload in ("none", "optimizer")
    )
    assert there.update_s - here.update_s == pytest.approx(2 * 10 * qwen.parameters / 50e9)
    older = find_chip("RTX 3090")
    assert older is not None and chip_machine(older).bus == 25e9


def test_prompts_are_measured_or_assumed() -> None:
    real = look_at_prompts(load("quickstart").config)
    assert 5 < real.tokens < 100 and real.num_problems == 10_000
    missing = look_at_prompts(load("gsm8k", ["data_path=gsm8k/train.jsonl"]).config)
    assert missing.tokens == 200 and "gsm8k/train.jsonl" in missing.source
    assert real.shared == missing.shared == 0
    klong = look_at_prompts(load("klong", ["model_name_or_path=pebble"]).config)
    assert 0.8 < klong.shared / klong.tokens < 1  # its system message explains the language


def test_what_all_prompts_begin_with_counts_once(qwen: ModelShape) -> None:
    assert H200 is not None
    alike = Work(prompts=32, group=16, prompt_tokens=500, shared_tokens=450, new_tokens=30)
    assert alike.update_tokens == 450 + 32 * (50 + 16 * 30)
    assert replace(alike, shared_tokens=0).update_tokens == 32 * (500 + 16 * 30)
    machine = chip_machine(H200)
    whole, shared = (setup(prompt_tokens=500, shared_tokens=n) for n in (0, 450))
    few, many = (rollout_seconds(qwen, kind, machine, 256, 8) for kind in (shared, whole))
    prefill = prefill_seconds(machine, qwen, Layout(gpus=1), 31 * 450)
    assert many - few == pytest.approx(prefill)  # 32 prompts of 8 completions


NAMES = {size: f"Qwen/Qwen2.5-{size.upper()}-Instruct" for size in ("0.5b", "1.5b", "3b", "7b")}
RUNS = json.loads((Path(__file__).parents[2] / "benchmarks/results/plan.json").read_text())["rows"]


@pytest.mark.parametrize("row", [row for row in RUNS if "peak_gb" in row], ids=lambda row: row["size"])
def test_plans_are_near_measurements_of_0_5b_to_7b(row: dict) -> None:
    """benchmarks/plan.py: random weights, completions of full length, one H200."""
    settings = {**json.loads(row["settings"]), **json.loads(row["change"]), "bf16": True, "max_steps": 1}
    rates = next(row["rates"] for row in RUNS if "rates" in row)
    assert H200 is not None
    for machine, bound in ((machine_of(**rates), 0.2), (chip_machine(H200), 0.3)):
        plan = estimate(
            build(settings),
            model_shape(NAMES[row["size"]]),
            replace(PROMPTS, tokens=row["prompt_tokens"]),
            capacity=row["usable_gb"] * 1e9,
            machine=machine,
            tokens=row["completion_tokens"],
        )
        assert -0.05 < plan.memory.peak / 1e9 / row["peak_gb"] - 1 < 0.10
        assert plan.time is not None
        if row["cap_gb"] is None:  # docs/lab/plan.md has the exception
            assert plan.time.batch_s == pytest.approx(row["step_s"], rel=bound)


# Prompts, completions of each, their mean length, changes; the peak of the process in GB (docs/lab/plan.md).
ON_CPU = [
    (2, 4, 32, {}, 3.57),
    (4, 8, 43, {}, 6.41),
    (4, 8, 43, {"use_peft": True}, 4.76),
    (4, 4, 45, {"gradient_checkpointing": True}, 3.79),
    (16, 8, 28, {}, 12.36),
]


@pytest.mark.parametrize(("prompts", "group", "tokens", "change", "peak"), ON_CPU)
def test_plans_of_a_cpu_are_near_what_smollm2_took(
    prompts: int, group: int, tokens: int, change: dict, peak: float
) -> None:
    sizes = {"prompts_per_step": prompts, "num_generations": group, "max_completion_length": tokens}
    config = build({"max_steps": 1, **sizes, **change})
    where = replace(PROMPTS, tokens=54)
    plan = estimate(config, model_shape("smollm2-135m"), where, capacity=25e9, on_gpu=False)
    assert plan.memory.peak / 1e9 == pytest.approx(peak, rel=0.15)
