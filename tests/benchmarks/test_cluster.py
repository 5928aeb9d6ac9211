"""Clusters by the event model: beside one real GPU and the closed formula, and which layouts are chosen."""

import itertools
from dataclasses import replace

import pytest

from benchmarks.cluster.__main__ import main
from benchmarks.cluster.layouts import (
    TP_SIZES,
    Job,
    Row,
    colocated,
    layouts,
    make_job,
    most_useful_count,
    paying_counts,
    scale_rows,
    with_servers,
)
from benchmarks.cluster.stages import exchange_seconds, gather_seconds, transfer_seconds
from tests.cost.test_plan import MEASURED
from whetstone.config import build, load
from whetstone.cost.chips import find_chip
from whetstone.cost.prompts import Prompts
from whetstone.cost.shape import model_shape
from whetstone.cost.step import H200, Layout, Work
from whetstone.cost.timing import chip_machine, rollout_seconds
from whetstone.errors import UserError

PROMPTS = Prompts(tokens=130, num_problems=7473, source="")


def job_for(name: str, gpu: str, *, tokens: float | None = None, **settings: object) -> Job:
    chip = find_chip(gpu)
    assert chip is not None
    defaults = {"bf16": True, "max_steps": 1, "prompts_per_step": 32, "num_generations": 8}
    config = build({**defaults, **settings})
    return make_job(
        config,
        model_shape(name),
        PROMPTS,
        machine=chip_machine(chip),
        capacity=chip.memory_gb * 1e9,
        tokens=tokens,
    )


@pytest.mark.parametrize(("recipe", "words", "tokens", "_peak", "rollout", "update", "skipped"), MEASURED)
def test_one_gpu_takes_what_real_runs_took(
    recipe: str, words: list[str], tokens: float, _peak: float, rollout: float, update: float, skipped: float
) -> None:
    shape = model_shape("Qwen/Qwen2.5-Coder-1.5B-Instruct")
    shape = replace(shape, parameters=shape.parameters + shape.vocabulary * shape.hidden)
    chip = find_chip("H200")
    assert chip is not None
    config = load(recipe, words).config
    job = make_job(config, shape, PROMPTS, machine=chip_machine(chip), capacity=150e9, tokens=tokens)
    placement = colocated(job, 1)
    assert placement is not None
    assert placement.result.rollout_s == pytest.approx(rollout, rel=0.2)
    assert placement.stages.update_s * (1 - skipped) == pytest.approx(update, rel=0.2)
    assert placement.result.step_s == pytest.approx(placement.result.rollout_s + placement.stages.update_s)


def test_full_lengths_take_what_the_closed_formula_says() -> None:
    for name, tp in (("Qwen/Qwen2.5-1.5B", 1), ("Qwen/Qwen2.5-7B", 1)):
        job = job_for(name, "H200", max_completion_length=1024)
        placement = colocated(job, 1)
        assert placement is not None and placement.layout.tp == tp
        formula = rollout_seconds(job.shape, job.setup, job.machine, 256, 1024)
        assert placement.result.rollout_s == pytest.approx(formula, rel=0.1)


def test_layouts_divide_the_model_and_fill_hosts() -> None:
    job = job_for("Qwen/Qwen2.5-7B", "H100")  # 28 heads, 4 of keys and values
    found = list(layouts(job, 32, TP_SIZES))
    assert {layout.tp for layout in found} == {1, 2, 4}
    assert all(layout.replicas * layout.shards * layout.tp == 32 for layout in found)
    spread = {layout.shards for layout in layouts(job, 24, TP_SIZES) if layout.tp == 1}
    assert spread == {24, 8, 4, 2, 1}  # 12, 6 and 3 would lie across hosts


def test_placements_use_all_gpus_and_what_they_hold_fits() -> None:
    job = job_for("Qwen/Qwen2.5-7B", "H100", tokens=300, max_completion_length=1024)
    rows = scale_rows(job, (1, 8, 16, 64))
    assert rows[0].colocated is rows[0].one_step_off is rows[0].best is None  # 16 bytes x 7.6 B on 80 GB
    for row in rows[1:]:
        for placement in (row.colocated, row.one_step_off):
            assert placement is not None and placement.gpus == row.gpus
            assert placement.memory.fits and placement.memory.peak < 80e9
            assert 0 <= placement.result.trainer_idle < 1 and 0 <= placement.result.sampler_idle < 1
            tokens = sum(map(sum, job.batches[1])) / placement.result.step_s
            assert placement.result.tokens_per_s == pytest.approx(tokens, rel=0.1)
        assert row.one_step_off is not None and row.one_step_off.layout.tp == 1
    times = [row.best.result.step_s for row in rows[1:] if row.best is not None]
    assert all(later < 1.01 * earlier for earlier, later in itertools.pairwise(times))
    again = scale_rows(job, (8,))[0].colocated
    assert again is not None and rows[1].colocated is not None
    assert again.result == rows[1].colocated.result


def test_one_step_off_is_faster_than_the_same_servers_in_turn() -> None:
    job = job_for("Qwen/Qwen2.5-7B", "H200", tokens=300, max_completion_length=1024)
    ahead, in_turn = (with_servers(job, 16, is_ahead=is_ahead) for is_ahead in (True, False))
    assert ahead is not None and in_turn is not None
    assert ahead.result.step_s < in_turn.result.step_s


def test_a_whole_copy_of_large_models_fits_no_rank() -> None:
    """Each rank holds the weights that go to servers; tp_size splits them for ranks that sample."""
    job = job_for("meta-llama/Llama-3.1-70B", "H100", max_completion_length=1024)
    row = scale_rows(job, (64,))[0]
    assert row.one_step_off is None and row.colocated is not None and row.colocated.layout.tp == 8


def test_where_one_step_off_pays_and_more_gpus_do_not() -> None:
    placement = colocated(job_for("Qwen/Qwen2.5-1.5B", "H200", max_completion_length=64), 8)
    assert placement is not None

    def row(gpus: int, first: float | None, second: float | None) -> Row:
        def option(seconds: float | None):
            if seconds is None:
                return None
            return replace(placement, result=replace(placement.result, step_s=seconds))

        return Row(gpus=gpus, colocated=option(first), one_step_off=option(second))

    rows = [row(1, 100, None), row(8, 20, 19), row(64, 10, 8.9), row(256, 9.9, 8.5), row(1024, None, 8.4)]
    assert paying_counts(rows) == [64, 256, 1024]  # 5 % are too little
    assert most_useful_count(rows) == 64
    assert most_useful_count(rows[:3]) == 64 and most_useful_count([row(1, None, None)]) is None


def test_weights_and_rollouts_take_their_bytes_over_the_links() -> None:
    work = Work(prompts=8, group=1, prompt_tokens=1000, new_tokens=1000)
    alone, eight, sixteen = (Layout(gpus=gpus) for gpus in (1, 8, 16))
    assert gather_seconds(H200, 1e9, alone) == exchange_seconds(H200, work, eight) == 0
    assert gather_seconds(H200, 1e9, eight) == pytest.approx(7 / 8 * 1e9 / 350e9)
    # 8 x 1,000 tokens of 24 bytes to each of 8 ranks of a host
    assert exchange_seconds(H200, work, sixteen) == pytest.approx(8 * 1000 * 24 * 8 / 2e9)
    assert transfer_seconds(H200, 7e9, alone, servers=7, tp=1) == pytest.approx(7 * 7e9 / 350e9)
    assert transfer_seconds(H200, 7e9, alone, servers=2, tp=4) == pytest.approx(2 * 7e9 / 42e9)  # two hosts
    both = 15 / 16 * 7e9 / 42e9 + 7e9 / 42e9
    assert transfer_seconds(H200, 7e9, sixteen, servers=1, tp=8) == pytest.approx(both)


def test_the_script_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["six_tasks", "--gpu", "H200", "--tokens", "200", "--gpus", "1", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    [first] = [line for line in lines if line.split()[:2] == ["1", "1x1x1"]]
    assert float(first.split()[3].rstrip("*")) == pytest.approx(2.3, rel=0.2)  # as it was measured
    large = ["model_name_or_path=meta-llama/Llama-3.1-70B", "max_completion_length=65536"]
    assert main(["six_tasks", *large, "--gpu", "L4", "--gpus", "1", "8"]) == 1
    with pytest.raises(UserError):
        main(["six_tasks", "loss_type=sft", "--gpu", "L4"])
