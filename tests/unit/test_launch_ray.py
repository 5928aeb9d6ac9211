"""The command line of `whet launch`; a run on a real Ray where there is one (marked slow)."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.e2e.test_train import words
from whetstone.errors import UserError
from whetstone.launch import parse


def test_flags_and_what_is_launched():
    found = parse(["--ray", "--ranks", "16", "--max-restarts=3", "train", "grpo", "tp_size=2"])
    assert (found.ranks, found.gpus, found.max_restarts) == (16, 1.0, 3)
    assert found.words == ["grpo", "tp_size=2"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["train"], "torchrun"),
        (["--ray", "train"], "how many ranks"),
        (["--ray", "--ranks", "two", "train"], "--ranks needs a number"),
        (["--ray", "--nodes=2", "train"], "'--nodes' is not known"),
        (["--ray", "--ranks=2"], "What shall be launched"),
    ],
)
def test_what_cannot_be_understood_is_said(given, named):
    with pytest.raises(UserError, match=named):
        parse(given)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray")
def test_two_ranks_on_a_real_ray(tmp_path):
    settings = words(tmp_path, max_steps=2, max_completion_length=16, eval_num_samples=0)
    command = ["launch", "--ray", "--ranks", "2", "--gpus-per-rank", "0", "train", *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
    subprocess.run([sys.executable, "-m", "whetstone", *command], check=True, timeout=300, env=environment)
    results = json.loads((tmp_path / "run" / "train_results.json").read_text())
    assert results["steps"] == 2
    assert "2 ranks: weights in 2 shards" in (tmp_path / "run" / "training.log").read_text()
