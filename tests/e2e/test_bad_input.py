"""What a person can get wrong: exit code 2, one sentence with the remedy, no traceback."""

import json

import pytest
import torch

from whetstone import __main__ as cli


def train(tmp_path, *words):
    base = ["model_name_or_path=pebble", "datasets={chain_sum: {}}", f"output_dir={tmp_path}", "run_name=run"]
    small = [
        "max_steps=1",
        "prompts_per_step=1",
        "num_generations=2",
        "eval_num_samples=0",
        "reward_workers=1",
        "preflight=off",
    ]
    return cli.run(["train", *base, *small, *words])


def rows(tmp_path, *entries):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return f"datasets={{math: {{config: {{path: {path}}}}}}}"


CASES = {
    "a key that is misspelt": (["learning_rat=1"], ["learning_rat", "did you mean 'learning_rate'"]),
    "a value out of bounds": (["temperature=-1"], ["temperature", "greater than or equal to 0.000001"]),
    "an unknown task": (["datasets={chain_sun: {}}"], ["chain_sun", "chain_sum", "whet tasks"]),
    "a task setting that is unknown": (
        ["datasets={chain_sum: {config: {max_term: 3}}}"],
        ["max_term", "max_terms"],
    ),
    "a batch that does not divide": (
        ["prompts_per_step=null", "per_device_train_batch_size=3", "num_generations=2"],
        ["per_device_train_batch_size to 4", "num_generations (2)"],
    ),
    "a prompt longer than the model allows": (
        ["max_completion_length=8180"],
        ["chain_sum/train", "max_completion_length"],
    ),
    "a model that is not there": (["model_name_or_path=./nowhere"], ["nowhere"]),
    "a data file that is not there": (
        ["datasets={math: {config: {path: no/such.jsonl}}}"],
        ["no/such.jsonl"],
    ),
    "a schedule that does not exist": (["lr_scheduler_type=cosin"], ["cosin", "constant_with_warmup"]),
    "an engine that is not installed": (["rollout_engine=sglang"], ["pip install", "rollout_servers"]),
    "a server that is not there": (
        ["rollout_engine=vllm", "rollout_servers=127.0.0.1:9", "server_timeout_s=1"],
        ["http://127.0.0.1:9", "whet serve"],
    ),
    "a reward function that is not there": (["reward_funcs=[my_rewards.py:f]"], ["my_rewards.py"]),
}


def complaint(capsys):
    error = capsys.readouterr().err
    assert error.startswith("whet: ") and error.count("\n") == 1 and "Traceback" not in error, error
    return error


@pytest.mark.parametrize("case", CASES)
def test_it_ends_in_one_sentence(tmp_path, capsys, case):
    words, named = CASES[case]
    assert train(tmp_path, *words) == 2
    error = complaint(capsys)
    for name in named:
        assert name in error


def test_a_configuration_that_is_not_there(capsys):
    assert cli.run(["train", "nowhere.yaml"]) == 2
    assert "nowhere.yaml" in complaint(capsys)


def test_rows_without_the_column_or_without_anything(tmp_path, capsys):
    assert train(tmp_path, rows(tmp_path, {"problem": "?", "result": "1"})) == 2
    error = complaint(capsys)
    assert "result" in error and "answer_column" in error
    assert train(tmp_path, rows(tmp_path)) == 2
    assert "rows.jsonl" in complaint(capsys)


def test_a_model_folder_without_weights(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert train(tmp_path, f"model_name_or_path={tmp_path / 'model'}") == 2
    error = complaint(capsys)
    assert str(tmp_path / "model") in error
    ending = (tmp_path / "run" / "training.log").read_text().splitlines()[-1]
    assert ending.endswith(error.removeprefix("whet: ").strip())


def test_a_folder_of_another_run_is_left_alone(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    assert train(tmp_path, "overwrite_output_dir=false") == 2
    error = complaint(capsys)
    assert str(tmp_path / "run") in error and "auto_resume=true" in error
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"step": 1}\n'


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there(tmp_path, capsys):
    assert train(tmp_path, "device=cuda") == 2
    error = complaint(capsys)
    assert "device=cpu" in error
