"""Runs that were cut in two, interrupted or killed end as one that was not."""

import json
import shutil
import signal

import pytest
import torch

from tests.support.runs import rows, run, wait_for, weights, whet, words

VARIANTS = {
    "plain": {},
    "reference and two iterations": {"beta": 0.05, "num_iterations": 2, "max_steps": 4, "save_steps": 2},
    "lora with dropout, two parts": {
        "use_peft": True,
        "lora_r": 4,
        "lora_dropout": 0.2,
        "steps_per_generation": 2,
        "max_steps": 8,
        "save_steps": 4,
    },
    "hf engine": {"rollout_engine": "hf"},
    "one batch ahead, dynamic sampling": {
        "async_rollouts": 1,
        "dynamic_sampling": True,
        "dynamic_sampling_max_rounds": 1,
        "fixed_eval_steps": 1,  # evaluations must neither disturb nor be disturbed
        "eval_greedy": False,
    },
    "one batch ahead, hf engine, lora with dropout": {
        "async_rollouts": 1,
        "rollout_engine": "hf",
        "use_peft": True,
        "lora_dropout": 0.2,
    },
    "an environment of several turns, one batch ahead": {
        "async_rollouts": 1,
        "datasets": "{guess_number: {config: {high: 5, max_guesses: 3}}}",
        "max_turns": 3,
        "full_determinism": True,
    },
    "8-bit states, frozen reference": {"optim": "adamw_8bit", "beta": 0.05},
    "one batch ahead on a curriculum, frozen reference": {
        "async_rollouts": 1,
        "beta": 0.05,
        "datasets": "{chain_sum: {curriculum: {up: 0.1, down: 0.0, window: 8}}}",
    },
    "critic, moving reference, adaptive coefficients, two iterations": {
        "num_iterations": 2,
        "advantage": "gae",
        "critic_learning_rate": 1e-3,
        "beta": 0.05,
        "kl_reference": "moving",
        "ref_model_sync_steps": 1,
        "target_kl": 0.01,
        "entropy_target": 0.1,
    },
}


# Twelve seconds each: the whole suite has eight minutes. Ctrl-C cuts a plain run, too; the two that are
# left have a reference and two iterations.
SLOW = (
    "plain",
    "reference and two iterations",
    "hf engine",
    "8-bit states, frozen reference",
    "lora with dropout, two parts",
    "one batch ahead, dynamic sampling",
    "one batch ahead, hf engine, lora with dropout",
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The folder of a run that nothing cut."""
    folder = tmp_path_factory.mktemp("plain")
    run(folder)
    return folder


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in VARIANTS]
)
def test_a_run_that_was_cut_in_two_equals_one_that_was_not(tmp_path, variant, request):
    settings = VARIANTS[variant]
    steps = settings.get("max_steps", 4)
    original = tmp_path / "whole" if settings else request.getfixturevalue("plain")
    if settings:
        run(original, **settings)
    # As if it had been killed after its first checkpoint: everything later is lost.
    shutil.copytree(original, tmp_path / "half")
    half = tmp_path / "half" / "run"
    for lost in ("final_model", f"checkpoint-{steps}"):
        shutil.rmtree(half / lost)
    (half / "eval_results" / f"eval_step_{steps}.json").unlink()
    run(tmp_path / "half", auto_resume=True, **settings)
    whole, resumed = weights(original / "run" / "final_model"), weights(half / "final_model")
    assert whole.keys() == resumed.keys()
    for name in whole:
        assert torch.equal(whole[name], resumed[name]), name
    assert rows(original, "train") == rows(tmp_path / "half", "train")
    assert rows(original, "eval") == rows(tmp_path / "half", "eval")
    if "curriculum" in variant:
        levels = [row["curriculum/chain_sum/level"] for row in rows(tmp_path / "half", "train")]
        assert levels[0] < levels[1] and levels[2] != levels[3], levels  # it moved before the cut and after


def test_ctrl_c_saves_first_and_the_run_goes_on_to_the_same_end(tmp_path, plain):
    settings = {"save_steps": 1000}  # has no part in what is trained
    process = whet("train", *words(tmp_path / "cut", **settings))
    wait_for(process, "step 1/4")
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 130, output
    assert "Traceback" not in output and "auto_resume=true" in output
    (saved,) = (tmp_path / "cut" / "run").glob("checkpoint-*")
    log = (tmp_path / "cut" / "run" / "training.log").read_text()
    assert "Stopped by" in log.splitlines()[-1]
    run(tmp_path / "cut", auto_resume=True, **settings)
    sessions = json.loads((tmp_path / "cut" / "run" / "run.json").read_text())["sessions"]
    step = int(saved.name.removeprefix("checkpoint-"))
    assert [entry["resumed_from_step"] for entry in sessions] == [None, step]
    assert sessions[0]["command"].startswith("whet train ")
    whole, resumed = (weights(folder / "run" / "final_model") for folder in (plain, tmp_path / "cut"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    for kind in ("train", "eval"):
        assert rows(plain, kind) == rows(tmp_path / "cut", kind)


@pytest.mark.slow
def test_kill_loses_no_more_than_the_steps_after_the_checkpoint(tmp_path):
    settings = {"max_steps": 6}
    process = whet("train", *words(tmp_path / "cut", **settings))
    wait_for(process, "step 3/6")
    process.kill()
    process.communicate()
    run(tmp_path / "cut", auto_resume=True, **settings)
    run(tmp_path / "whole", **settings)
    whole, resumed = (weights(tmp_path / name / "run" / "final_model") for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert rows(tmp_path / "whole", "train") == rows(tmp_path / "cut", "train")
