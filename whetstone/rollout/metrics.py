"""Metrics of a step's rollouts: reward, accuracy, lengths, truncation, outcomes of programs."""

from collections.abc import Iterable, Sequence
from statistics import fmean, pstdev

from whetstone.types import Finish, Group, Rollout


def rollout_metrics(groups: Iterable[Group]) -> dict[str, float]:
    groups = list(groups)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.score.reward for rollout in rollouts]
    reward_parts = sorted({part for rollout in rollouts for part in rollout.score.parts})
    metrics = {
        "reward": fmean(rewards),
        "reward_std": pstdev(rewards),
        **_accuracy("accuracy", rollouts),
        **length_metrics(rollouts),
        "scoring_failures": float(sum(rollout.score.failure is not None for rollout in rollouts)),
    }
    for part in reward_parts:
        values = [rollout.score.parts[part] for rollout in rollouts if part in rollout.score.parts]
        metrics |= {f"rewards/{part}/mean": fmean(values), f"rewards/{part}/std": pstdev(values)}
    outcomes = [rollout.score.outcome for rollout in rollouts if rollout.score.outcome is not None]
    for outcome in ("passed", "wrong", "crash", "timeout", "compile_error", "no_program") if outcomes else ():
        metrics[f"programs/{outcome}_ratio"] = outcomes.count(outcome) / len(outcomes)
    for task in sorted({group.problem.task for group in groups}):
        of_task = [r for group in groups if group.problem.task == task for r in group.rollouts]
        metrics |= _accuracy(f"accuracy/{task}", of_task)
    return metrics


def length_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """TRL's metrics of lengths in tokens; `terminated`: of completions that were not truncated, 0 if none."""
    lengths = [len(rollout.completion.token_ids) for rollout in rollouts]
    is_truncated = [rollout.completion.finish is Finish.LENGTH for rollout in rollouts]
    terminated = [n for n, truncated in zip(lengths, is_truncated, strict=True) if not truncated] or [0]
    return {
        "completions/mean_length": fmean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": fmean(is_truncated),
        "completions/mean_terminated_length": fmean(terminated),
        "completions/min_terminated_length": float(min(terminated)),
        "completions/max_terminated_length": float(max(terminated)),
    }


def _accuracy(name: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The fraction of correct answers; nothing where the problems have no known answer."""
    scored = [rollout.score for rollout in rollouts if rollout.score.failure is None]
    if scored and not any("correct" in score.parts for score in scored):
        return {}
    return {name: fmean(r.score.parts["correct"] for r in rollouts if "correct" in r.score.parts)}


def variance_metrics(groups: Iterable[Group]) -> dict[str, float]:
    """Fractions of prompts whose rewards are all equal (they give no gradient), and whose answers are."""
    groups = list(groups)
    return {
        "frac_reward_zero_std": fmean(not group.has_reward_variance for group in groups),
        "frac_answers_identical": fmean(len({r.score.answer for r in g.rollouts}) == 1 for g in groups),
    }
