"""`accelerate launch` with several processes, on CPUs: the same run as under torchrun, or a word why not."""

import os
import subprocess
import sys

import pytest

from tests.distributed.launch import free_port
from tests.support.runs import rows, weights, words
from whetstone.errors import UserError
from whetstone.parallel.mesh import check_launcher

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


def test_what_tells_that_ranks_are_missing():
    asked = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with pytest.raises(UserError, match="--multi_gpu"):
        check_launcher(asked)
    check_launcher({**asked, "WORLD_SIZE": "1"})  # as torchrun tells a rank of one
    check_launcher({"ACCELERATE_MIXED_PRECISION": "no"})  # --num_processes 1
    check_launcher({"MASTER_ADDR": "node1", "MASTER_PORT": "29500"})  # left over from elsewhere
