"""Metrics of a step's rollouts: reward, accuracy, lengths, truncation, programs; the check of logprobs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, pstdev

from whetstone.config import Config
from whetstone.config.engine_traits import engine_traits
from whetstone.errors import UserError, non_finite
from whetstone.types import Finish, Group, Rollout

STALE_FACTOR = 10  # for the logprobs of stale samples


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
    if episodes := [rollout for rollout in rollouts if rollout.episode is not None]:
        metrics |= episode_metrics(episodes)
    for task in sorted({group.problem.task for group in groups}):
        of_task = [r for group in groups if group.problem.task == task for r in group.rollouts]
        metrics |= _accuracy(f"accuracy/{task}", of_task)
    return metrics


def episode_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Turns, tool calls and what went wrong, of rollouts with an environment."""
    episodes = [rollout.episode for rollout in rollouts if rollout.episode is not None]
    return {
        "episodes/mean_turns": fmean(len(rollout.turns) for rollout in rollouts),
        "episodes/mean_segments": fmean(len(rollout.branches) for rollout in rollouts),
        "episodes/mean_observation_length": fmean(rollout.num_observed for rollout in rollouts),
        "episodes/tool_calls": fmean(episode.num_tool_calls for episode in episodes),
        "episodes/tool_errors": fmean(episode.num_tool_errors for episode in episodes),
        "episodes/environment_s": fmean(episode.environment_s for episode in episodes),
        "episodes/max_turns_ratio": fmean(episode.finish is Finish.MAX_TURNS for episode in episodes),
        "episodes/failed_ratio": fmean(episode.error is not None for episode in episodes),
    }


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
    judged = [rollout.score.parts["correct"] for rollout in rollouts if "correct" in rollout.score.parts]
    if not judged or (scored and not any("correct" in score.parts for score in scored)):
        return {}
    return {name: fmean(judged)}


def variance_metrics(groups: Iterable[Group], advantage: str = "group") -> dict[str, float]:
    """Fractions of prompts whose rewards are all equal (they give no gradient), and whose answers are."""
    several, metrics = [group for group in groups if len(group.rollouts) > 1], {}
    if several and advantage in ("group", "rloo"):  # other baselines leave a gradient to equal rewards
        metrics["frac_reward_zero_std"] = fmean(not group.rewards_differ() for group in several)
    if several:
        identical = [len({r.score.answer for r in group.rollouts}) == 1 for group in several]
        metrics["frac_answers_identical"] = fmean(identical)
    return metrics


def logprob_bound(config: Config, staleness: float = 0.0) -> float | None:
    """By how much the logprobs of engine and trainer may differ in the mean; None: there is no bound.

    top_p raises the engine's logprobs by at most -log(top_p) per token; for top_k and min_p nothing is known.
    """
    if config.loss.is_supervised or config.rollout.top_k or config.rollout.min_p:
        return None
    if staleness and engine_traits(config.rollout.rollout_engine).in_process:
        return None  # an in-process copy can't miss an update
    allowed = config.engines.max_logprob_difference * (STALE_FACTOR if staleness else 1)
    return allowed - math.log(config.rollout.top_p)


def check_logprob_difference(metrics: Mapping[str, float], config: Config, staleness: float = 0.0) -> None:
    """Raise a UserError when the logprobs of engine and trainer differ by more than rounding."""
    if (bound := logprob_bound(config, staleness)) is None:
        return
    difference = metrics["sampling/sampling_logp_difference/mean"]
    if non_finite(difference=difference) and metrics.get("skipped_steps"):
        return  # the trainer's own logprobs: `max_skipped_steps` ends such a run
    if difference <= bound:
        return
    name = config.rollout.rollout_engine
    raise UserError(
        f"The {name} engine's logprobs differ from the trainer's by {difference:.3g} a token in the mean (at "
        f"most {bound:.3g} is allowed, see max_logprob_difference): it does not sample "
        "from the trainer's weights, and this step should not count. Go on from the last checkpoint with "
        "weight_transfer=disk or rollout_engine=native; if the engine merely computes this model less "
        "exactly, raise max_logprob_difference and set importance_correction=token_truncate."
    )
