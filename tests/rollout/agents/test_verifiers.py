"""verifiers v1 as the agent, with its clients for messages and for tokens, in an environment of its own."""

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.rollout.agents import verifiers_agent
from whetstone.config import build
from whetstone.engines.base import SamplingParams
from whetstone.engines.native import NativeEngine
from whetstone.model.chat import Chat
from whetstone.model.policy import load_policy
from whetstone.rollout.collector import Collector, NullScorer
from whetstone.run.agents import make_agents
from whetstone.tasks.registry import make_task
from whetstone.types import Finish

TASK = "chain_sum"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "VERIFIERS_PYTHON" not in os.environ,
        reason="$VERIFIERS_PYTHON names no Python of an environment with verifiers 0.4 and uv",
    ),
]


@pytest.mark.parametrize(("client", "num_turns"), [("eval", 2), ("train", 1)])
def test_verifiers_solves_a_problem(client: str, num_turns: int, tmp_path: Path) -> None:
    config = build(
        {
            "model_name_or_path": "pebble",
            "eval_num_samples": 0,
            "datasets": {TASK: {}},
            "agent": f"{verifiers_agent.__file__}:solve",
            "agent_max_length": 1024,
            "environment_timeout_s": 300,
            "environment_memory_mb": 64_000,
        }
    )
    policy = load_policy(config.model, None, torch.device("cpu"))
    chat = Chat(policy.tokenizer, config.model)
    with contextlib.ExitStack() as stack:
        settings = make_agents(config, policy, chat, stack)
        assert settings is not None
        own, report = settings.row, tmp_path / "report.json"
        more = {"client": client, "folder": policy.lm.name_or_path, "report": str(report)}
        collector = Collector(
            NativeEngine(policy, 2),
            NullScorer(),
            chat,
            max_prompt_length=None,
            max_length=policy.max_length,
            agents=replace(settings, row=lambda problem: {**own(problem), **more}),
        )
        (group,) = collector.collect(
            [make_task(config, TASK, config.tasks.datasets[TASK], "train").problem(0)],
            num_samples=1,
            sampling=SamplingParams(max_tokens=256),
            seed_parts=(1, "verifiers"),
        )
    (rollout,) = group.rollouts
    assert rollout.episode is not None and rollout.episode.error is None, rollout.episode
    assert rollout.episode.finish is Finish.STOP and len(rollout.turns) == num_turns
    theirs = json.loads(report.read_text())
    assert theirs["said"] == rollout.text.strip()
    if client == "train":  # it has the tokens that are trained on
        completion = rollout.turns[0].completion
        assert theirs["token_ids"] == [list(completion.token_ids)]
        assert theirs["logprobs"][0] == pytest.approx(completion.logprobs, abs=1e-6)
