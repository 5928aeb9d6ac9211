"""A real Ray places two ranks and a real vLLM, which is killed in the middle of a batch and brought back."""

import os
import re
import signal

import pytest

from tests.support.launch import FLAGS, ROOT, Launched, processes
from tests.support.runs import rows
from whetstone.engines.servers.http import HttpClient, Unreachable

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm", reason="make test-vllm sets it up")
pytest.importorskip("ray", reason="make test-vllm sets it up")

SETTINGS = {
    "rollout_engine": "vllm",
    "server_timeout_s": 900,
    "server_max_model_length": 256,
    "max_num_seqs": 32,
    "max_steps": 2,
    "prompts_per_step": 4,
    "num_generations": 8,
    "max_completion_length": 48,
    "eval_num_samples": 0,
}


def num_running(url):
    """Requests that vLLM is at."""
    try:
        text = HttpClient(url).get("/metrics", timeout_s=2.0)
    except Unreachable:
        return 0
    return sum(float(n) for n in re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", text, re.MULTILINE))


def test_ranks_and_a_server_on_ray_and_sigkill_in_the_middle_of_a_batch(tmp_path):
    with Launched(tmp_path, [*FLAGS, "--servers", "1"], **SETTINGS) as launched:
        launched.wait_for(lambda: "all rollout servers are up" in launched.said, 900)
        (url,) = re.findall(r"whet: starting (http://127.0.0.1:\d+)\.", launched.said)
        launched.wait_for(lambda: num_running(url) >= 8)
        (server,) = processes("vllm.entrypoints.cli.main serve", f"--port {url.rpartition(':')[2]}")
        os.kill(server, signal.SIGKILL)
        assert launched.end(900) == 0, launched.said
    log = (tmp_path / "run" / "training.log").read_text()
    print(launched.said)
    assert re.search(rf"{url} is lost \(.*waiting for its return", log)
    assert f"Up again: {url}." in launched.said and f"{url} is back and has the current weights" in log
    train = rows(tmp_path, "train")
    print("logprob difference of each step", [row["sampling/sampling_logp_difference/mean"] for row in train])
    assert len(train) == 2 and max(row["sampling/sampling_logp_difference/mean"] for row in train) < 1e-3
    assert not processes("vllm.entrypoints", str(ROOT)) and not processes("VLLM::EngineCore")
