"""Seconds by stage, utilisation and peak memory: the formulas by hand, the device table, and real batches."""

import mmap
import time

import pytest
import torch

from tests.conftest import make_policy
from whetstone.config import build
from whetstone.rollout.source import RolloutBatch
from whetstone.run.timing import (
    StageTimer,
    ThroughputMeter,
    flops_per_token,
    peak_flops,
    peak_memory_gb,
    reset_peak_memory,
)
from whetstone.types import Completion, Finish, Group, Problem, Rollout, Score, Turn
from whetstone.update.experience import ExperienceBuilder
from whetstone.update.packing import Sample, pack

CPU = torch.device("cpu")
EMBEDDING = 97 * 32  # of make_policy(), which is looked up: its output matrix is another


def touch(num_bytes: int) -> None:
    """Use so much memory and give it back to the system at once."""
    with mmap.mmap(-1, num_bytes) as pages:
        pages.write(b"1" * num_bytes)


def rollout(prompt: tuple[int, ...], num_tokens: int) -> Rollout:
    return Rollout(
        prompt_ids=prompt,
        turns=(
            Turn(
                completion=Completion(
                    token_ids=tuple(range(3, 3 + num_tokens)),
                    logprobs=(-1.0,) * num_tokens,
                    finish=Finish.STOP,
                    policy_version=0,
                )
            ),
        ),
        text="",
        score=Score(reward=0.0, parts={"correct": 0.0}, answer=None),
    )


def made(rollouts: list[Rollout], **seconds: float) -> RolloutBatch:
    problem = Problem(id="a/train/0", task="a", messages=({"role": "user", "content": "?"},), answer=None)
    group = Group(problem=problem, rollouts=tuple(rollouts))
    return RolloutBatch(groups=[group], indices=[0], levels={}, metrics={}, **seconds)  # type: ignore[arg-type]


def test_flops_by_hand():
    assert flops_per_token(trained=1000, frozen=0) == 6000
    # LoRA: 1000 frozen weights pass the gradient on but have none; the adapter of 10 has both
    assert flops_per_token(trained=10, frozen=1000) == 60 + 4000


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_peak_rate_by_the_name_of_the_device(name, tflops):
    assert peak_flops(name, None) == tflops * 1e12
    assert peak_flops(name, 100.0) == 100e12  # what the user says wins


def test_nobody_knows_the_peak_rate_of_a_cpu_or_of_a_new_device():
    assert peak_flops(None, None) is None
    assert peak_flops("NVIDIA Z9000", None) is None
    assert peak_flops(None, 0.5) == 5e11


def test_mfu_of_a_step_by_hand():
    policy = make_policy()
    rollouts = [rollout((5, 6, 7, 8), 3), rollout((5, 6, 7, 8), 5)]
    samples = [Sample(rollout=r, index=i, keep=True) for i, r in enumerate(rollouts)]
    batches = pack(samples, 100)
    meter = ThroughputMeter(policy, num_iterations=2, peak_tflops=1e-3)
    meter.start_step().seconds |= {"rollout": 3.0, "update": 0.5}
    meter.timer.peaks_gb |= {"rollout": 1.5, "update": 2.5}
    row = meter.metrics(made(rollouts, seconds=2.9, scoring_s=0.4, sync_s=0.1), [batches])
    # the prompt of 4 is run once, with 3 and 5 tokens behind it; twice over, since there are two iterations
    assert row["update_tokens_per_s"] == pytest.approx(2 * (4 + 3 + 5) / 0.5)
    num_parameters = sum(p.numel() for p in policy.model.parameters()) - EMBEDDING
    assert row["mfu"] == pytest.approx(6 * num_parameters * 24 / (0.5 * 1e9))
    assert row["peak_memory_gb"] == 2.5
    assert row["time/weight_sync"] == pytest.approx(0.1)
    assert row["time/reward_wait"] == pytest.approx(0.4)
    assert row["time/rollout"] == pytest.approx(2.5)
    assert row["tokens_per_s"] == pytest.approx(8 / 3.5)
    assert row["rollout_tokens_per_s"] == pytest.approx(8 / 2.5)


def test_mfu_counts_the_passes_without_gradients():
    policy = make_policy()
    batches = pack([Sample(rollout=rollout((5, 6), 3), index=0, keep=True)], 100)
    meter = ThroughputMeter(policy, num_iterations=2, num_passes=1, peak_tflops=1e-3)
    meter.start_step().seconds |= {"rollout": 3.0, "update": 0.5}
    meter.timer.peaks_gb["update"] = 1.0
    row = meter.metrics(made([rollout((5, 6), 3)], seconds=2.9, scoring_s=0.4), [batches])
    num_parameters = sum(p.numel() for p in policy.model.parameters()) - EMBEDDING
    assert row["mfu"] == pytest.approx((2 * 6 + 2) * num_parameters * (2 + 3) / (0.5 * 1e9))


@pytest.mark.parametrize(
    ("settings", "minibatches", "passes"),
    [
        ({}, 1, 0),
        ({}, 4, 1),  # old logprobs: the later minibatches meet another policy
        ({"beta": 0.1}, 1, 1),  # the reference
        ({"beta": 0.1}, 2, 2),
        ({"beta": 0.1, "kl_in": "reward"}, 1, 2),
        ({"beta": 0.1, "kl_reference": "rollout", "num_iterations": 2}, 1, 1),
    ],
)
def test_passes_without_gradients(settings, minibatches, passes):
    config = build(settings)
    policy = make_policy()
    reference = object() if config.loss.beta > 0 and config.loss.kl_reference != "rollout" else None
    assert ExperienceBuilder(policy, reference, None, config).num_passes(minibatches) == passes  # type: ignore[arg-type]


def test_no_mfu_where_the_peak_is_unknown():
    meter = ThroughputMeter(make_policy(), num_iterations=1, peak_tflops=None)
    meter.start_step().seconds |= {"rollout": 1.0, "update": 1.0}
    meter.timer.peaks_gb["update"] = 1.0
    assert "mfu" not in meter.metrics(made([rollout((5,), 1)], seconds=1.0, scoring_s=0.0), [])


def test_a_batch_sampled_in_the_background_costs_only_the_wait():
    timer = StageTimer(CPU)
    timer.seconds = {"rollout": 0.2, "update": 1.0}
    row = timer.metrics(made([rollout((5,), 10)], seconds=5.0, scoring_s=1.0, sync_s=0.05))
    assert row["time/reward_wait"] == pytest.approx(0.15)  # no more than was waited, less the sync
    assert row["time/rollout"] == pytest.approx(0.0)
    assert row["rollout_tokens_per_s"] == pytest.approx(10 / 4.0)


def test_the_timer_times_stages_and_their_peak_memory():
    timer = StageTimer(CPU)
    with timer("rollout"):
        time.sleep(0.02)
        touch(200_000_000)
    with timer("update"):
        time.sleep(0.01)
    assert timer.seconds["rollout"] >= 0.02 and timer.seconds["update"] >= 0.01
    assert timer.peaks_gb["rollout"] - timer.peaks_gb["update"] > 0.15


def test_peak_memory_is_kept_until_it_begins_anew():
    reset_peak_memory(CPU)
    before = peak_memory_gb(CPU)
    touch(200_000_000)
    assert peak_memory_gb(CPU) - before > 0.15
    reset_peak_memory(CPU)
    assert peak_memory_gb(CPU) - before < 0.05
