"""One process writes into a run folder, in whatever order several begin; a killed one is in nobody's way."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

import whetstone
from tests.support.checkpoints import config_in, opened
from whetstone.config import load
from whetstone.errors import UserError
from whetstone.export.folder import export
from whetstone.run import lock
from whetstone.run.lock import RunLock
from whetstone.run.source import find_source
from whetstone.train import train

# Holds the lock with a forked child, which outlives it.
HOLDER = """
import os, sys, time
from pathlib import Path
from whetstone.run.lock import RunLock
with RunLock(Path(sys.argv[1])):
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
    time.sleep(60)
"""


def test_a_killed_process_leaves_no_lock(tmp_path):
    run = tmp_path / "r"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        for shared in (False, True):
            who = f"process {holder.pid} on {socket.gethostname()}"
            with pytest.raises(UserError, match=f"r is in use by {who}"), RunLock(run, shared=shared):
                pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert (run / lock.NAME).is_file()  # but nobody holds it: not even the child
        with RunLock(run):
            pass
        os.kill(child, signal.SIGKILL)
    assert list(run.iterdir()) == []


def test_several_may_share_a_lock(tmp_path):
    with RunLock(tmp_path, shared=True):
        with RunLock(tmp_path, shared=True):
            pass
        with pytest.raises(UserError, match="an earlier run of this process"), RunLock(tmp_path):
            pass
    with RunLock(tmp_path):
        pass


def test_a_renamed_folder_is_free_and_its_place_is_not(tmp_path):
    run, moved = tmp_path / "r", tmp_path / "moved"
    with RunLock(run) as held:
        run.rename(moved)
        held.renamed(moved)
        with RunLock(moved):
            pass
        with pytest.raises(UserError, match="in use"), RunLock(run):
            pass
    assert list(run.iterdir()) == list(moved.iterdir()) == []


def test_a_file_system_without_locks_is_said_once(tmp_path, monkeypatch, caplog):
    def fail(handle, mode):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", fail)
    with RunLock(tmp_path):
        assert (tmp_path / lock.NAME).read_text().split() == [str(os.getpid()), socket.gethostname()]
    assert len(caplog.records) == 1 and "has no locks" in caplog.text


def test_a_file_that_is_not_found_again_is_no_endless_loop(tmp_path, monkeypatch):
    monkeypatch.setattr(lock.os.path, "samestat", lambda mine, its: False)  # an object store mounted by FUSE
    with RunLock(tmp_path), pytest.raises(UserError, match="in use"), RunLock(tmp_path):
        pass


def test_what_is_in_the_way_of_the_lock_is_named(tmp_path):
    (tmp_path / lock.NAME).mkdir()
    with pytest.raises(UserError, match=r"can't be written \(.*\.lock: Is a directory\)"), RunLock(tmp_path):
        pass


def test_a_folder_with_other_runs_is_not_moved(tmp_path):
    config = config_in(tmp_path.parent, run_name=tmp_path.name, overwrite_output_dir=True)
    (tmp_path / "metrics.jsonl").write_text("precious")
    (tmp_path / "dice").mkdir()
    (tmp_path / "dice" / "config.yaml").write_text("seed: 1\n")
    (tmp_path / "dice" / "run.json").write_text("{}")
    with pytest.raises(UserError, match=r"holds another run.*\(dice\).*set run_name"):
        opened(config)
    assert (tmp_path / "metrics.jsonl").read_text() == "precious"
    files = tmp_path / "wandb" / "offline-run-1" / "files"
    files.mkdir(parents=True)
    (tmp_path / "dice").rename(files / "dice")
    (files / "dice" / "run.json").unlink()  # a config.yaml, but no run
    _, checkpoint, notes = opened(config)
    assert checkpoint is None and "The earlier run was moved to" in notes[0]


def test_nobody_else_gets_into_a_live_run(tmp_path, request):
    words = {
        "datasets": {"chain_sum": {}}, "output_dir": str(tmp_path), "run_name": "r", "max_steps": 2,
        "prompts_per_step": 2, "num_generations": 2, "max_completion_length": 8, "eval_num_samples": 0,
        "preflight": "off", "save_steps": 1, "reward_workers": 1,
    }  # fmt: skip
    lines = [f"{key}={value}" for key, value in words.items()]
    run = tmp_path / "r"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    live = whetstone.steps(None, **words)
    next(live)
    while not (run / "checkpoint-1").is_dir():  # it is written in the background
        time.sleep(0.01)
    before = sorted(path.name for path in tmp_path.iterdir())
    refused = pytest.raises(UserError, match=f"{re.escape(str(run))} is in use by .*process")
    overwrite = ["overwrite_output_dir=true", "max_steps=1"]
    for more in (overwrite, ["auto_resume=true"], ["sft_steps=1", *overwrite], ["loss_type=sft", *overwrite]):
        with refused:
            train(load(None, [*lines, *more]))
    with refused:
        export(find_source(str(run)))
    weights = {"eval_num_samples": 2, "checkpoint_path": str(run / "checkpoint-1")}
    with refused:
        whetstone.evaluate(None, **words | weights)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    live.close()  # saves
    resumed = train(load(None, [*lines, "auto_resume=true"]))
    assert resumed["steps"] == 2 and not (run / lock.NAME).exists()
