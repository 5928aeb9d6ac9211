"""The command line of `whet launch`; whole runs by torchrun and on a real Ray (marked slow), the rollout
servers played by our own small server that speaks SGLang's interface and samples from a real model. The same
with a real vLLM: tests/vllm/test_launch_ray.py.
"""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.launch import FLAGS, ROOT, Launched, processes
from tests.support.protocol_server import ModelServer
from tests.support.runs import rows, run, weights, words
from whetstone.commands import launch as launch_command
from whetstone.commands.launch import launch
from whetstone.commands.launch.args import launch_args, resolve_servers
from whetstone.commands.launch.cluster import explain_shortage
from whetstone.commands.parser import CommandParser
from whetstone.config import load
from whetstone.errors import UserError
from whetstone.model.hub import resolve
from whetstone.parallel import local_ranks

SETTINGS = {"max_steps": 4, "save_steps": 10, "max_completion_length": 16, "eval_num_samples": 0}
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install ray")


def parse(argv):
    return launch_args(CommandParser("launch", launch_command).parse(argv))


def test_flags_and_what_is_launched():
    found = parse(["--ray", "--ranks", "16", "--max-restarts=3", "train", "grpo", "tp_size=2"])
    assert (found.ranks, found.gpus, found.max_restarts, found.servers) == (16, 1.0, 3, None)
    assert found.train_args == ["grpo", "tp_size=2"]
    found = parse(["--ray", "--ranks=2", "--servers=3", "--gpus-per-server", "2", "--wait", "9", "train"])
    assert (found.servers, found.gpus_per_server, found.wait_s) == (3, 2, 9.0)
    assert found.bundles == [{"CPU": 1.0, "GPU": 1.0}] * 2 + [{"CPU": 1.0, "GPU": 2}] * 3


def test_without_ray_ranks_are_started_on_this_machine(monkeypatch):
    started = []
    monkeypatch.setattr(local_ranks, "torchrun", lambda *args: started.append(args) or 3)
    monkeypatch.setenv("WHETSTONE_SHARE_GPU", "0")
    assert launch(parse(["--ranks=2", "--max-restarts=1", "train", "quickstart", "max_steps=1"])) == 3
    assert started == [(2, 1, ["train", "quickstart", "max_steps=1"])]
    assert not local_ranks.shares_gpu()
    launch(parse(["--ranks=2", "--share-gpu", "train", "quickstart"]))
    assert local_ranks.shares_gpu()  # and in the ranks, which inherit it
    assert parse(["--ranks=2", "train"]).share_gpu
    with pytest.raises(UserError, match="max_stepz"):
        launch(parse(["--ranks=2", "train", "quickstart", "max_stepz=1"]))
    assert len(started) == 2


def test_the_exit_code_is_that_of_the_ranks():
    """Of `whet explain` on a run that does not exist, and of `whet --version`."""
    code = "from whetstone.parallel.local_ranks import *; exit(torchrun(2, 0, __import__('sys').argv[1:]))"
    ended = [
        subprocess.run(
            [sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        for args in (["explain", "nowhere"], ["--version"])
    ]
    assert [one.returncode for one in ended] == [2, 0], ended[0].stderr
    assert "Traceback" not in ended[0].stderr


@pytest.mark.slow
def test_two_ranks_on_this_machine(tmp_path):
    with Launched(tmp_path, ["--ranks", "2", "--share-gpu"], **{**SETTINGS, "max_steps": 2}) as launched:
        assert launched.end() == 0, launched.said
    assert json.loads((tmp_path / "run" / "train_results.json").read_text())["steps"] == 2
    log = (tmp_path / "run" / "training.log").read_text()
    assert "2 ranks: weights in 2 shards" in log
    assert log.count("All ranks share one GPU (WHETSTONE_SHARE_GPU): ") == 1


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["train"], "--ranks"),
        (["--ranks=2", "--gpus-per-rank=0", "train"], "--gpus-per-rank is for a Ray cluster"),
        (["--ranks=2", "--servers=0", "train"], "--servers.*add --ray"),
        (["--ray", "--ranks=2", "--share-gpu", "train"], "leave out --share-gpu"),
        (["--ray", "train"], "--ranks"),
        (["--ray", "--ranks", "two", "train"], "--ranks.*'two'"),
        (["--ray", "--ranks=2", "--servers=-1", "train"], "--servers.*-1"),
        (["--ray", "--ranks=2", "--cpus-per-server=nan", "train"], "--cpus-per-server.*nan"),
        (["--ray", "--nodes=2", "train"], "'--nodes'"),
        (["--ray", "--ranks=2"], "train"),
    ],
)
def test_what_cannot_be_understood_is_said(given, named):
    with pytest.raises(UserError, match=named):
        parse(given)


def settled(flags, *settings):
    found = resolve_servers(parse(["--ray", "--ranks=2", *flags, "train"]), load(None, settings).config)
    return found.servers, found.gpus_per_server


def test_how_many_servers_a_configuration_gets():
    assert settled([]) == (0, None)
    assert settled([], "rollout_engine=vllm") == (1, 1)
    assert settled(["--servers=3"], "rollout_engine=sglang", "server_tensor_parallel_size=4") == (3, 4)
    assert settled(["--gpus-per-rank=0", "--servers=2"], "rollout_engine=vllm") == (2, 0)
    assert settled(["--servers=0"], "rollout_engine=vllm", "server_devices=[1]") == (0, None)
    assert settled([], "rollout_engine=vllm", "rollout_servers=node1:8000") == (0, None)


@pytest.mark.parametrize(
    ("flags", "settings", "named"),
    [
        (["--servers=1"], [], "native.*rollout_engine=vllm"),
        (["--servers=1"], ["rollout_engine=vllm", "vllm_mode=colocate"], "vllm_mode=server"),
        (
            ["--servers=1"],
            ["rollout_engine=vllm", "rollout_servers=n:8000"],
            "http://n:8000",
        ),
        ([], ["rollout_engine=vllm", "server_devices=[6,7]"], "--servers 2"),
        (["--gpus-per-server=4"], ["rollout_engine=vllm"], "server_tensor_parallel_size=4"),
        ([], ["rollout_engine=vllm", "tp_size=2"], "tp_size=1"),
    ],
)
def test_servers_that_contradict_the_configuration(flags, settings, named):
    with pytest.raises(UserError, match=named):
        settled(flags, *settings)


def test_what_a_cluster_lacks_is_said():
    asked = resolve_servers(
        parse(["--ray", "--ranks=6", "--servers=2", "train"]),
        load(None, ["rollout_engine=vllm", "server_tensor_parallel_size=4"]).config,
    )
    machine = {"CPU": 16.0, "GPU": 4.0}
    said = explain_shortage(asked, {"CPU": 32.0, "GPU": 8.0}, {"CPU": 32.0, "GPU": 7.0}, [machine, machine])
    assert "6 ranks with 1 CPU and 1 GPU each and 2 servers with 1 CPU and 4 GPU each" in said
    assert "8 CPUs (it has 32, 32 of them free) and 14 GPUs (it has 8, 7 of them free)" in said
    assert "large enough" not in said
    assert "large enough for one server with 1 CPU and 4 GPU" in explain_shortage(
        asked, {}, {}, [{"CPU": 9.0, "GPU": 2.0}]
    )


def test_folder_of_another_run_is_refused_before_start(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}")
    with pytest.raises(UserError, match=re.escape(str(tmp_path / "run"))):
        launch(parse(["--ray", "--ranks=1", "train", *words(tmp_path, overwrite_output_dir=False)]))


@pytest.mark.slow
@needs_ray
def test_two_ranks_on_a_real_ray(tmp_path):
    with Launched(tmp_path, FLAGS, **{**SETTINGS, "max_steps": 2}) as launched:
        assert launched.end() == 0, launched.said
    results = json.loads((tmp_path / "run" / "train_results.json").read_text())
    assert results["steps"] == 2
    assert "2 ranks: weights in 2 shards" in (tmp_path / "run" / "training.log").read_text()


@pytest.mark.slow
@needs_ray
def test_a_server_that_ray_placed_dies_twice_and_nothing_is_lost(tmp_path):
    """First the server, in the middle of a batch, then its actor. All is as in one process with a server that
    lives.
    """
    (tmp_path / "ray").mkdir()
    served = {**SETTINGS, "rollout_engine": "sglang", "server_args": "[--delay,0.5]", "max_num_seqs": 1}
    with Launched(tmp_path / "ray", [*FLAGS, "--servers", "1"], **served) as launched:
        launched.wait_for_step(1)
        (url,) = re.findall(r"whet: starting (http://127.0.0.1:\d+)\.", launched.said)
        (server,) = processes("sglang.launch_server", f"--port {url.rpartition(':')[2]}")
        time.sleep(0.8)
        os.kill(server, signal.SIGKILL)
        launched.wait_for_step(3)
        assert f"{url} has ended: starting it again" in launched.said
        assert launched.said.count(f"Up again: {url}.") == 1
        log = tmp_path / "ray" / "run" / "training.log"
        lost = re.findall(rf"{url} is lost \((.*?)\)", log.read_text())
        print("lost because", lost)
        assert lost and f"{url} is back and has the current weights" in log.read_text()
        time.sleep(0.8)
        (actor,) = processes("ray::EngineServer")
        os.kill(actor, signal.SIGKILL)
        assert launched.end() == 0, launched.said
        assert f"the Ray actor of the server {url} died" in launched.said
    assert not processes("sglang.launch_server", str(ROOT))
    server = ModelServer("sglang", Path(resolve("pebble")))
    run(tmp_path / "one", **SETTINGS, rollout_engine="sglang", rollout_servers=server.url)
    server.kill()
    for mine, theirs in zip(rows(tmp_path / "ray", "train"), rows(tmp_path / "one", "train"), strict=True):
        for key in ("reward", "loss", "grad_norm"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-6), key
        assert mine["sampling/sampling_logp_difference/mean"] < 1e-4
    ours, theirs = (weights(tmp_path / name / "run" / "final_model") for name in ("ray", "one"))
    worst = max(((ours[name] - theirs[name]).norm() / theirs[name].norm()).item() for name in ours)
    assert worst < 1e-3, worst


@pytest.mark.slow
@needs_ray
def test_ctrl_c_saves_and_stops_the_servers(tmp_path):
    served = {**SETTINGS, "max_steps": 500, "rollout_engine": "sglang"}
    with Launched(tmp_path, [*FLAGS, "--servers", "1"], **served) as launched:
        launched.wait_for_step(2)
        launched.process.send_signal(signal.SIGINT)
        assert launched.end() == 130, launched.said
    assert list((tmp_path / "run").glob("checkpoint-*")), launched.said
    assert not processes("sglang.launch_server", str(ROOT)) and not processes(
        "whetstone train", str(tmp_path)
    )


@pytest.mark.slow
@needs_ray
def test_what_can_not_be_placed_or_started_is_said(tmp_path):
    served = {**SETTINGS, "rollout_engine": "sglang"}
    flags = [*FLAGS, "--servers", "2", "--cpus-per-server", "500", "--wait", "1"]
    with Launched(tmp_path, flags, **served) as launched:
        assert launched.end() == 2, launched.said
    assert "2 servers with 500 CPU each: that is 1001 CPUs" in launched.said
    assert "large enough for one server with 500 CPU" in launched.said
    with Launched(tmp_path, [*FLAGS, "--servers=1"], **served, server_args="[--broken]") as launched:
        assert launched.end() == 2, launched.said
    assert "Rollout server 0: The server could not start (exit code 1)" in launched.said
    assert "ValueError: no such model here" in launched.said
