"""Completions of a step, as `completions/` has them."""

import json
from pathlib import Path
from typing import Any

from whetstone.config import Config, Plan
from whetstone.evaluation.evaluator import plain_answer
from whetstone.files import atomic_write, json_safe
from whetstone.rollout.learning_signal import LearningSignal
from whetstone.rollout.metrics import length_metrics, rollout_metrics, variance_metrics
from whetstone.types import Episode, Group


def completion_row(step: int, group: Group, sample: int) -> dict[str, Any]:
    """What is written of a completion, prompt messages and all."""
    rollout = group.rollouts[sample]
    return {
        "step": step,
        "problem": group.problem.id,
        "task": group.problem.task,
        "messages": [dict(message) for message in group.problem.messages],
        "sample": sample,
        "completion": rollout.text,
        "gold": plain_answer(group.problem.answer),
        "answer": rollout.score.answer,
        "reward": rollout.score.reward,
        "parts": dict(rollout.score.parts),
        "failure": rollout.score.failure,
        **({"outcome": rollout.score.outcome} if rollout.score.outcome else {}),
        **({"tests": list(rollout.score.tests)} if rollout.score.tests else {}),
        **({"extra": dict(rollout.score.extra)} if rollout.score.extra else {}),
        **({} if rollout.episode is None else _episode_row(rollout.episode)),
        "length": len(rollout.completion.token_ids),
        "finish": rollout.completion.finish.value,
    }


def _episode_row(episode: Episode) -> dict[str, Any]:
    row: dict[str, Any] = {
        "turns": [dict(message) for message in episode.messages],
        "turn_rewards": list(episode.rewards),
        "turn_seconds": [round(seconds, 4) for seconds in episode.seconds],
        "environment_s": round(episode.environment_s, 4),
    }
    if episode.num_tool_calls:
        row |= {"tool_calls": episode.num_tool_calls, "tool_errors": episode.num_tool_errors}
    return row if episode.error is None else {**row, "environment_error": episode.error}


def write_completions(run_folder: Path, step: int, groups: list[Group]) -> None:
    """`completions/step_N.jsonl`: one line per completion."""
    rows = [completion_row(step, group, sample) for group in groups for sample in range(len(group.rollouts))]
    text = "".join(json.dumps(json_safe(row), ensure_ascii=False) + "\n" for row in rows)
    atomic_write(run_folder / "completions" / f"step_{step}.jsonl", text)


def log_rollouts(
    folder: Path, step: int, groups: list[Group], config: Config, plan: Plan, signal: LearningSignal
) -> dict[str, float]:
    """Write completions where they are due; returns the metrics of the rollouts."""
    if plan.is_due(config.run.log_completions_steps, step) or step == plan.updates_per_batch:
        write_completions(folder, step, groups)
    epoch = {"epoch": plan.epoch(step)}
    if config.loss.is_supervised:
        return epoch | length_metrics([rollout for group in groups for rollout in group.rollouts])
    signal.observe(groups)
    return epoch | rollout_metrics(groups) | variance_metrics(groups, config.loss.advantage)
