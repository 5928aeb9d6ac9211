"""Whole runs with an agent: training, evaluation and exact resume."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rollout.agents import agents
from tests.support.runs import rows, run, weights

# Time, and the last bits of the engine's logprobs: they depend on what is sampled at the same moment.
VARYING = {"episodes/environment_s": 0, "episodes/idle_s": 0, "sampling/sampling_logp_difference/mean": 0}
KEYS = {
    "agent": f"{Path(agents.__file__)}:twice",
    "agent_max_length": 512,
    "reward_funcs": f"[{Path(agents.__file__)}:spread]",
    "num_generations": 3,
    "max_completion_length": 64,
    "eval_num_samples": 2,
    "max_steps": 2,
    "save_steps": 1,
    "log_completions_steps": 1,
}


def run_and_resume(tmp_path: Path, **keys: Any) -> None:
    """Two steps at once, and the second one again from a checkpoint: the same weights and metrics."""
    run(tmp_path / "whole", **keys)
    run(tmp_path / "parts", **keys)
    checkpoint = tmp_path / "parts" / "run" / "checkpoint-1"
    run(tmp_path / "parts", **keys, resume_from_checkpoint=checkpoint, overwrite_output_dir=False)
    first, second = (weights(tmp_path / name / "run" / "final_model") for name in ("whole", "parts"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    for kind in ("train", "eval"):
        own, resumed = (rows(tmp_path / name, kind)[-1] for name in ("whole", "parts"))
        assert {**own, **VARYING} == {**resumed, **VARYING}


@pytest.mark.slow
def test_a_run_with_an_agent_resumes_exactly(tmp_path: Path) -> None:
    run_and_resume(tmp_path, **KEYS)
    first_step = rows(tmp_path / "whole", "train")[0]
    assert first_step["episodes/mean_turns"] > 1 and first_step["grad_norm"] > 0
    lines = (tmp_path / "parts" / "run" / "completions" / "step_1.jsonl").read_text().splitlines()
    turns = [json.loads(line)["turns"] for line in lines]
    assert any([message["role"] for message in own] == ["assistant", "user", "assistant"] for own in turns)


@pytest.mark.slow
def test_a_run_with_rewritten_histories_resumes_exactly(tmp_path: Path) -> None:
    run_and_resume(tmp_path, **{**KEYS, "agent": f"{Path(agents.__file__)}:forgets"})
    steps = rows(tmp_path / "whole", "train")
    assert [row["episodes/mean_segments"] for row in steps] == [3, 3]
    assert all(row["sampling/sampling_logp_difference/mean"] < 1e-4 for row in steps)
    assert any(row["grad_norm"] > 0 for row in steps)
