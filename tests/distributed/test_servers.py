"""Two ranks that share a rollout server: the first sends the weights, each asks for its own samples."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.protocol_server import ModelServer
from tests.support.runs import rows, run, weights, words
from whetstone.model.hub import resolve

SETTINGS: dict[str, Any] = {
    "max_steps": 2,
    "save_steps": 10,
    "max_completion_length": 16,
    "eval_num_samples": 0,
}
AHEAD: dict[str, Any] = {
    **SETTINGS,
    "async_rollouts": 1,
    "max_steps": 4,
    "save_steps": 2,
    "eval_num_samples": 2,
    "fixed_eval_steps": 2,
    "dynamic_sampling": True,
    "dynamic_sampling_max_rounds": 1,
}


def on_two_ranks(folder, url, code="import whetstone.__main__; whetstone.__main__.main()", **settings):
    """`whet train` on two ranks with the server at `url`; `code` runs in each."""
    given = {**settings, "rollout_engine": "vllm", "rollout_servers": url, "heartbeat_timeout_s": 5}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rank.py").write_text(code)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    return subprocess.run(
        [sys.executable, *launcher, str(folder / "rank.py"), "train", *words(folder, **given)],
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def assert_same(two, one):
    for mine, theirs in zip(rows(two, "train"), rows(one, "train"), strict=True):
        for key in ("reward", "loss", "grad_norm", "staleness"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-6), key
    ours, theirs = (weights(folder / "run" / "final_model") for folder in (two, one))
    worst = max(((ours[name] - theirs[name]).norm() / theirs[name].norm()).item() for name in ours)
    assert worst < 1e-3, worst


@pytest.fixture
def server():
    server = ModelServer("vllm", Path(resolve("pebble")), 0)
    yield server
    server.kill()


@pytest.mark.slow
def test_two_ranks_with_a_server_equal_one_process_with_the_native_engine(tmp_path, server):
    done = on_two_ranks(tmp_path / "two", server.url, **SETTINGS)
    assert done.returncode == 0, done.stderr
    run(tmp_path / "one", **SETTINGS)
    assert_same(tmp_path / "two", tmp_path / "one")
    assert all(
        row["sampling/sampling_logp_difference/mean"] < 1e-4 for row in rows(tmp_path / "two", "train")
    )


@pytest.mark.slow
def test_two_ranks_one_batch_ahead_equal_one_process_and_go_on_where_they_were_cut(tmp_path, server):
    """Sampling talks to the other rank from a thread while the update does: with evaluations in between,
    further rounds of sampling, and a batch under way in the checkpoint.
    """
    two = tmp_path / "two"
    done = on_two_ranks(two, server.url, **AHEAD)
    assert done.returncode == 0, done.stderr
    run(tmp_path / "one", **AHEAD)
    assert [row["staleness"] for row in rows(two, "train")] == [0, 1, 1, 1]
    assert_same(two, tmp_path / "one")
    for lost in ("final_model", "checkpoint-4"):
        shutil.rmtree(two / "run" / lost)
    (two / "run" / "eval_results" / "eval_step_4.json").unlink()
    done = on_two_ranks(two, server.url, auto_resume=True, **AHEAD)
    assert done.returncode == 0 and "(step 2)" in done.stdout, done.stdout + done.stderr
    assert_same(two, tmp_path / "one")


FAILS = """
import os, whetstone.__main__, whetstone.update.updater
step, steps = whetstone.update.updater.Updater.step, []
def fails(*arguments):
    steps.append(1)
    if os.environ["RANK"] == "1" and len(steps) == 2:
        raise RuntimeError("memory ran out here")
    return step(*arguments)
whetstone.update.updater.Updater.step = fails
whetstone.__main__.main()
"""


@pytest.mark.slow
def test_a_rank_that_fails_while_the_next_batch_is_sampled_ends_the_other(tmp_path, server):
    server.delay_s = 0.5  # sampling is at work when it happens
    begun = time.monotonic()
    done = on_two_ranks(tmp_path, server.url, FAILS, **AHEAD)
    print(f"ended after {time.monotonic() - begun:.0f} s")
    assert done.returncode != 0 and time.monotonic() - begun < 100
    log = (tmp_path / "run" / "training.log").read_text()
    assert "memory ran out here" in done.stderr, done.stderr
    assert "memory ran out here" in log or "connection to another rank was lost" in log, log
