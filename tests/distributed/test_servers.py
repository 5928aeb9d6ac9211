"""Two ranks that share a rollout server: the first sends the weights, each asks for its own samples."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_train import rows, run, weights, words
from tests.protocol_server import ModelServer
from whetstone.model.embedded import resolve

SETTINGS = {"max_steps": 2, "save_steps": 10, "max_completion_length": 16, "eval_num_samples": 0}


@pytest.mark.slow
def test_two_ranks_with_a_server_equal_one_process_with_the_native_engine(tmp_path):
    server = ModelServer("vllm", Path(resolve("pebble")), 0)
    try:
        given = {**SETTINGS, "rollout_engine": "vllm", "rollout_servers": server.url}
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "whetstone"]
        subprocess.run(
            [sys.executable, *command, "train", *words(tmp_path / "two", **given)],
            check=True,
            timeout=200,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    finally:
        server.kill()
    run(tmp_path / "one", **SETTINGS)
    for mine, theirs in zip(rows(tmp_path / "two", "train"), rows(tmp_path / "one", "train"), strict=True):
        for key in ("reward", "loss", "grad_norm"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-6), key
        assert mine["sampler_logprob_difference"] < 1e-4
    ours, theirs = (weights(tmp_path / name / "run" / "final_model") for name in ("two", "one"))
    worst = max(((ours[name] - theirs[name]).norm() / theirs[name].norm()).item() for name in ours)
    assert worst < 1e-3, worst
