"""Whole runs of the embedded model: what they write, the same seed, evaluation alone, programs."""

import json
import math

import pytest
import torch

from tests.support.runs import rows, run, weights, whet, words
from whetstone.config import load
from whetstone.run.metrics import read_rows
from whetstone.train import evaluate_only, train

SHORT = {"max_steps": 2, "save_strategy": "no"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of two steps that is evaluated before and after, and its results."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, run(folder, max_steps=2, eval_greedy=True)


def test_what_a_run_leaves_behind(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    results = run(tmp_path, fixed_eval_steps=2)
    folder = tmp_path / "run"
    for name in (
        "config.yaml",
        "run.json",
        "training.log",
        "metrics.jsonl",
        "train_results.json",
        "report.html",
        "final_model",
    ):
        assert (folder / name).exists(), name
    assert results == json.loads((folder / "train_results.json").read_text())
    for when in ("accuracy_before", "accuracy_after"):
        accuracy = results[when]
        assert (
            accuracy["num_problems"] == 6
            and 0 <= accuracy["low"] <= accuracy["mean"] <= accuracy["high"] <= 1
        )
    assert results["steps"] == 4 and results["seconds"] > 0
    assert sorted(path.name for path in (folder / "eval_results").iterdir()) == [
        "eval_step_0.json", "eval_step_2.json", "eval_step_4.json",
    ]  # fmt: skip
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    assert len((folder / "completions" / "step_2.jsonl").read_text().splitlines()) == 8
    log = (folder / "training.log").read_text()
    assert log.index("step 2/4") < log.index("Evaluation at step 2") < log.index("step 3/4")
    assert f"whet explain {folder}" in log.split("Next:")[1]
    train_rows = rows(tmp_path, "train")
    assert [row["step"] for row in train_rows] == [1, 2, 3, 4]
    second = [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "train"][1]
    assert second["step_time"] > second["time/eval"] > 0 and second["time/reward_wait"] >= 0
    assert second["host/memory_gb"] > 0.1 and abs(second["host/memory_growth_gb"]) < second["host/memory_gb"]
    assert second["host/disk_free_gb"] > 0 and ("gpu/memory_used_gb" in second) <= torch.cuda.is_available()
    for key in (
        "reward",
        "accuracy",
        "entropy",
        "loss",
        "grad_norm",
        "clip_ratio/region_mean",
        "completions/mean_length",
        "completions/clipped_ratio",
    ):
        assert all(math.isfinite(row[key]) for row in train_rows), key
    assert all(row["sampling/sampling_logp_difference/mean"] < 1e-4 for row in train_rows)
    assert load(folder / "config.yaml").config == load(None, words(tmp_path, fixed_eval_steps=2)).config
    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoint-4")
    prompt = AutoTokenizer.from_pretrained(folder / "checkpoint-4")("2 + 2", return_tensors="pt")
    final = AutoModelForCausalLM.from_pretrained(folder / "final_model")
    assert torch.equal(model(**prompt).logits, final(**prompt).logits)


def test_training_moves_the_weights_and_the_same_seed_repeats(tmp_path, finished):
    run(tmp_path / "again", **SHORT)  # checkpoints and greedy answers have no part in it
    run(tmp_path / "other", **SHORT, seed=7)
    folders = (finished[0], tmp_path / "again", tmp_path / "other")
    a, b, c = (weights(folder / "run" / "final_model") for folder in folders)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(a[name], c[name]) for name in a)


def test_a_run_goes_on_without_the_reader_of_its_output(tmp_path):
    process = whet("train", *words(tmp_path, max_steps=1, eval_num_samples=2))
    assert process.stdout is not None
    assert process.stdout.readline().startswith("whetstone ")  # as `| head -1` does
    process.stdout.close()
    assert process.wait(timeout=120) == 0
    assert (tmp_path / "run" / "final_model").is_dir()
    report = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert all(f'id="{view}-view"' in report for view in ("curves", "groups", "evaluation"))
    log = (tmp_path / "run" / "training.log").read_text()
    assert log.count("Nothing more can be printed") == 1 and "step 1/1" in log


def test_evaluation_alone_agrees_with_the_runs_own(finished, capsys):
    tmp_path, results = finished
    capsys.readouterr()
    changes = {"run_name": "eval", "checkpoint_path": tmp_path / "run" / "final_model", "eval_greedy": True}
    summary = evaluate_only(load(None, words(tmp_path, **changes)))
    folder = tmp_path / "run" / "evaluations" / "final_model"
    assert (folder / "eval_results" / "eval_step_2.json").is_file()
    shown = capsys.readouterr().out
    assert f"Evaluation of {tmp_path / 'run' / 'final_model'} (step 2)" in shown.replace("\n", " ")
    assert str(folder / "eval_results") in shown and "since step 0" not in shown
    assert "(step 2)" in (folder / "evaluation.log").read_text()
    assert summary["accuracy"] == results["accuracy_after"]
    assert summary["greedy_accuracy"] == results["greedy_after"]


@pytest.mark.slow
def test_it_learns_one_batch_ahead(tmp_path):
    settings = {"async_rollouts": 1, "max_steps": 6, "prompts_per_step": 8, "learning_rate": 3e-4}
    settings |= {"eval_num_samples": 64, "eval_greedy": False, "fixed_eval_steps": 0, "save_strategy": "no"}
    settings |= {"output_dir": tmp_path, "eval_num_examples_to_print": 0, "reward_workers": 1}
    results = train(load("quickstart", [f"{key}={value}" for key, value in settings.items()]))
    gain = results["delta_vs_step0"]
    assert gain["difference"] >= 0.15 and gain["p_value"] < 0.05, gain
    lines = (tmp_path / "quickstart" / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if row["kind"] == "train"]
    assert [row["staleness"] for row in steps] == [0, 1, 1, 1, 1, 1]
    assert (
        steps[0]["sampling/sampling_logp_difference/mean"]
        < 1e-4
        < steps[1]["sampling/sampling_logp_difference/mean"]
    )


def test_programs_are_run_and_their_tests_written_down(tmp_path):
    problems = [
        {
            "statement": f"{a} + {b} =",
            "function": "f",
            "starter_code": "def f():\n    return ",
            "tests": [{"args": [], "expected": a + b}, {"code": "print(f())", "stdout": str(a + b)}],
            "solution": f"def f():\n    return {a + b}",
        }
        for a in range(4)
        for b in range(4)
    ]
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in problems))
    settings = (
        f'{{code: {{config: {{path: "{path}", language: python, continue_starter: true, '
        "eval_fraction: 0.3}}}"
    )
    run(tmp_path, datasets=settings, reward_funcs="accuracy", eval_samples_per_problem=2, eval_temperature=1)
    shares = [
        sum(value for key, value in row.items() if key.startswith("programs/"))
        for row in rows(tmp_path, "train")
    ]
    assert shares and all(abs(share - 1) < 1e-9 for share in shares), "every program has one outcome"
    (file, *_) = sorted((tmp_path / "run" / "completions").glob("*.jsonl"))
    for line in map(json.loads, file.read_text().splitlines()):
        assert line["outcome"] in ("passed", "wrong", "crash", "timeout", "compile_error", "no_program")
        assert len(line.get("tests", [])) == (0 if line["outcome"] == "no_program" else 2)
    document = json.loads((tmp_path / "run" / "eval_results" / "eval_step_0.json").read_text())
    assert all("tests" in answered for answered in document["completions"])
    assert set(document["summary"]["pass_at_k"]) == {"1", "2"}
    assert "Programs run in a sandbox" in (tmp_path / "run" / "training.log").read_text()
