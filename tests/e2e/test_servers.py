"""Whole runs with rollout servers, against our own small server that speaks vLLM's interface and draws as the
native engine does (tests/support/protocol_server.py): such a run must equal one with the native engine,
number for number. The same with a real vLLM: tests/vllm.
"""

import threading
import time

import pytest
import torch

from tests.support.protocol_server import ModelServer
from tests.support.runs import rows, run, weights
from whetstone.config import load
from whetstone.errors import UserError
from whetstone.model.hub import resolve
from whetstone.rollout.metrics import check_logprob_difference

SETTINGS = {
    "max_steps": 2,
    "save_steps": 10,
    "num_generations": 3,
    "max_completion_length": 24,
    "eval_num_samples": 2,
    "eval_greedy": False,
}


@pytest.fixture
def start():
    from pathlib import Path

    servers = []

    def make(port=0):
        servers.append(ModelServer("vllm", Path(resolve("pebble")), port))
        return servers[-1]

    yield make
    for server in servers:
        if not server.is_dead:
            server.kill()


def same(one, other):
    """Two runs' rows but for what only servers have."""
    for mine, theirs in zip(rows(one, "train"), rows(other, "train"), strict=True):
        for key in ("reward", "accuracy", "completions/mean_length", "loss", "grad_norm"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-6), key


@pytest.mark.parametrize("ahead", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_with_servers_equals_one_without(tmp_path, start, monkeypatch, ahead):
    """Also where the next batch is sampled while this one is learnt from."""
    monkeypatch.setattr("whetstone.engines.servers.pool.CHECK_EVERY_S", 0.05)
    settings = {**SETTINGS, "async_rollouts": ahead, "max_steps": 2 + ahead}
    run(tmp_path / "native", **settings)
    first, second = start(), start()
    first.die_after = 3

    def bring_back():
        while not first.is_dead:
            time.sleep(0.05)
        start(first.port)

    helper = threading.Thread(target=bring_back, daemon=True)
    helper.start()
    addresses = f"{first.url},{second.url}"
    run(tmp_path / "servers", rollout_engine="vllm", rollout_servers=addresses, max_num_seqs=2, **settings)
    helper.join()
    same(tmp_path / "native", tmp_path / "servers")
    ours = weights(tmp_path / "servers" / "run" / "final_model")
    theirs = weights(tmp_path / "native" / "run" / "final_model")
    # Rates of 1e-3 and below: Adam makes rounding visible where a gradient is near zero (1.1e-5 was seen).
    differences = {name: (weight - theirs[name]).abs() for name, weight in ours.items()}
    assert max(difference.max().item() for difference in differences.values()) < 5e-5
    assert torch.cat([difference.flatten() for difference in differences.values()]).mean() < 1e-8
    if not ahead:
        assert (
            max(row["sampling/sampling_logp_difference/mean"] for row in rows(tmp_path / "servers", "train"))
            < 1e-4
        )


def test_a_push_that_goes_wrong_in_silence_stops_the_run(tmp_path, start, monkeypatch):
    """The server says that it has the new weights, and keeps the old ones."""
    server = start()
    monkeypatch.setattr(server, "load_tensors", lambda tensors: None)
    with pytest.raises(UserError, match=r"logprobs.*weight_transfer=disk"):
        run(
            tmp_path, rollout_engine="vllm", rollout_servers=server.url, **{**SETTINGS, "learning_rate": 0.02}
        )


def test_the_bound_on_the_difference():
    def check(difference, *words, staleness=0.0, skipped=0.0):
        metrics = {"sampling/sampling_logp_difference/mean": difference, "skipped_steps": skipped}
        check_logprob_difference(metrics, load(None, words).config, staleness)

    check(0.09)
    with pytest.raises(UserError, match=r"0\.11 .*0\.1 "):
        check(0.11)
    with pytest.raises(UserError, match="nan"):
        check(float("nan"))
    check(float("nan"), skipped=1.0)  # the trainer's own: max_skipped_steps ends such a run
    with pytest.raises(UserError):
        check(0.11, skipped=1.0)
    check(0.11, "max_logprob_difference=0.2")
    check(0.9, "rollout_engine=vllm", staleness=1.0)  # the policy has moved since
    with pytest.raises(UserError):
        check(1.1, "rollout_engine=vllm", staleness=1.0)
    check(1.1, staleness=1.0)  # a copy in this process is what it is
    check(0.19, "top_p=0.9")  # which may raise the engine's logprobs by 0.105
    with pytest.raises(UserError):
        check(0.21, "top_p=0.9")
    check(5.0, "top_k=10")  # no bound is known
