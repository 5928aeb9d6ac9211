"""`accelerate launch` with several processes, on CPUs: the same run as under torchrun, or a word why not."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.distributed.launch import free_port
from tests.support.runs import rows, weights, words

FILES = Path(__file__).resolve().parents[1] / "data" / "accelerate"
SETTINGS = {"max_steps": 2, "save_steps": 10, "max_completion_length": 16, "eval_num_samples": 0}
ACCELERATE = ["accelerate.commands.launch", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]


def launched(folder, *launcher):
    command = [sys.executable, "-m", *launcher, "-m", "whetstone", "train", *words(folder, **SETTINGS)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")}
    return subprocess.run(
        command, timeout=200, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )


@pytest.mark.slow
def test_two_processes_of_accelerate_equal_two_of_torchrun(tmp_path):
    ours = launched(
        tmp_path / "a", *ACCELERATE, "--multi_gpu", "--num_processes=2", f"--main_process_port={free_port()}"
    )
    theirs = launched(tmp_path / "t", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    assert (ours.returncode, theirs.returncode) == (0, 0), ours.stderr + theirs.stderr
    assert "2 ranks: weights in 2 shards" in (tmp_path / "a" / "run" / "training.log").read_text()
    assert len(rows(tmp_path / "a", "train")) == 2
    assert rows(tmp_path / "a", "train") == rows(tmp_path / "t", "train")
    mine, others = (weights(tmp_path / name / "run" / "final_model") for name in ("a", "t"))
    assert all(mine[name].equal(others[name]) for name in others)


@pytest.mark.slow
def test_one_process_in_place_of_two_is_refused(tmp_path):
    """As accelerate starts it on a machine without GPUs."""
    done = launched(tmp_path, *ACCELERATE, "--cpu", "--num_processes=2")
    assert done.returncode != 0 and "started this one alone" in done.stderr, done.stderr
    assert "torchrun --nproc_per_node=2" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "zero3", "zero3_json"])
def test_a_file_of_the_user_is_taken_over(tmp_path, kind):
    """By accelerate itself; the two of DeepSpeed need it installed."""
    if kind != "fsdp" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs DeepSpeed: pip install deepspeed")
    file = tmp_path / "asked.yaml"
    file.write_text((FILES / f"{kind}.yaml").read_text().replace("FOLDER", str(FILES)))
    launcher = [
        "accelerate.commands.launch",
        "--config_file",
        str(file),
        f"--main_process_port={free_port()}",
    ]
    done = launched(tmp_path, *launcher)
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert {key: config[key] for key in ASKED[kind]} == ASKED[kind]
    log = (tmp_path / "run" / "training.log").read_text()
    assert "2 ranks: weights in 2 shards" in log
    for key in ASKED[kind]:
        assert log.count(f"is taken for {key}: ") == 1, log


ASKED = {
    "fsdp": {"bf16": True, "cpu_offload": "all", "gradient_checkpointing": True},
    "zero3": {
        "bf16": True,
        "cpu_offload": "optimizer",
        "max_grad_norm": 0.5,
        "gradient_accumulation_steps": 2,
    },
    "zero3_json": {"bf16": True, "cpu_offload": "all", "max_grad_norm": 0.25},
}
