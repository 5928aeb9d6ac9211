"""The preflight: sample and score some training prompts before step 1, and judge what a run could learn.

It has seeds of its own and leaves nothing behind, so a run computes the same with and without it. Every rank
takes part; the first one judges.
"""

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from whetstone.config import Config
from whetstone.errors import UserError
from whetstone.files import atomic_write, json_safe
from whetstone.model.policy import Policy
from whetstone.parallel.collectives import broadcast_from_main
from whetstone.rollout.failures import REMEDIES, Failure, failures
from whetstone.rollout.learning_signal import explain_equal_rewards, has_learning_signal
from whetstone.rollout.metrics import logprob_bound
from whetstone.rollout.source import RolloutSource
from whetstone.terminal.findings import Finding, Status
from whetstone.terminal.stages import stage
from whetstone.terminal.text import counted
from whetstone.types import Finish, Group
from whetstone.update.packing import make_samples, pack

NUM_PROMPTS = 8  # of a round
MAX_COMPLETIONS = 128  # of a round
MAX_ROUNDS = 3  # until some reward differs: with few completions, equal rewards may be chance
NUM_COMPARED = 8  # completions whose logprobs the trainer computes
TOKENS_AT_ONCE = 8_192  # of the trainer's forward pass
TRUNCATED_WARNING, TRUNCATED_STOP = 0.2, 0.9
NO_ANSWER_WARNING = 0.5
VARIANCE_WARNING = 0.2
FILE = "preflight.json"
logger = logging.getLogger("whetstone")


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What was measured, what follows, and the prompt of one problem as the model sees it."""

    findings: tuple[Finding, ...]
    measurements: dict[str, float]
    problem: str
    prompt: str

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.status is Status.PROBLEM]

    @property
    def stops(self) -> bool:
        return bool(self.problems)

    def summary(self) -> str:
        """The main numbers in a line."""
        numbers = self.measurements
        parts = [
            f"{numbers['num_completions']:,} completions of {numbers['num_prompts']:,} prompts",
            f"{_percent(numbers['truncated_ratio'])} truncated",
        ]
        if "no_answer_ratio" in numbers:
            parts.append(f"{_percent(numbers['no_answer_ratio'])} without an answer")
        if "reward_variance_ratio" in numbers:
            parts.append(f"rewards differ on {_percent(numbers['reward_variance_ratio'])} of the prompts")
        return f"Preflight: {', '.join(parts)}."

    def as_dict(self) -> dict[str, Any]:
        return json_safe({"stops": self.stops, **asdict(self)})

    def error(self) -> UserError:
        """What stops the run."""
        text = " ".join(f"{problem.text}. {problem.remedy}" for problem in self.problems)
        if self.problems[0].name in REMEDIES:
            return UserError(f"The preflight found a failure: {text}")
        return UserError(
            f"The preflight found that nothing can be learned: {text} "
            "To train anyway, set preflight=warn; preflight=off skips the preflight."
        )


def preflight(config: Config, source: RolloutSource, policy: Policy, folder: Path) -> None:
    """Examine a run before its first step; write preflight.json, log warnings, and stop a hopeless run."""
    if config.run.preflight == "off":
        return
    result = examine(config, source, policy)
    if policy.ranks.is_main:
        atomic_write(folder / FILE, json.dumps(result.as_dict(), ensure_ascii=False, indent=1))
    stopped_by = result.problems if config.run.preflight == "stop" else []
    for finding in result.findings:
        if finding.status is not Status.OK and finding not in stopped_by:
            logger.warning(f"Preflight, {finding.name}: {finding.text}. {finding.remedy}")
    if stopped_by:
        raise result.error()
    logger.info(result.summary())


def examine(config: Config, source: RolloutSource, policy: Policy) -> Preflight:
    """Sample, score and compare logprobs. A collective call: all ranks get the result of the first."""
    started_at = time.monotonic()
    with stage("preflight"):
        source.sync_weights(0)
        number = min(NUM_PROMPTS, max(2, MAX_COMPLETIONS // config.rollout.num_generations))
        groups = source.probe(0, number)
        measurements = {}
        if not config.loss.is_supervised:
            for first in range(number, MAX_ROUNDS * number, number):
                if has_learning_signal(groups, config) or _truncated_ratio(groups) > TRUNCATED_STOP:
                    break
                groups += source.probe(first, number)
            measurements = compare_logprobs(config, policy, groups)
        measurements = measure(config, groups) | measurements
        prompt_ids = list(groups[0].rollouts[0].prompt_ids)
        result = Preflight(
            findings=tuple(judge(config, groups, measurements)),
            measurements={**measurements, "seconds": time.monotonic() - started_at},
            problem=groups[0].problem.id,
            prompt=policy.tokenizer.decode(prompt_ids, skip_special_tokens=False),
        )
    return broadcast_from_main(policy.ranks, result)


@torch.no_grad()
def compare_logprobs(config: Config, policy: Policy, groups: Sequence[Group]) -> dict[str, float]:
    """Engine against trainer, on the first completion of each prompt; the same on all ranks."""
    firsts = [Group(problem=group.problem, rollouts=group.rollouts[:1]) for group in groups[:NUM_COMPARED]]
    policy.model.eval()
    differences = []
    with policy.uncompiled():  # a compiler would take longer than everything else here
        for batch in pack(make_samples(firsts, config), TOKENS_AT_ONCE):
            logprobs = policy.logprobs(batch.to(policy.device), config.training_temperature)
            differences.append((logprobs.float().cpu() - batch.sampler_logprobs).abs())
    difference = torch.cat(differences)
    return {
        "logprob_difference_mean": difference.mean().item(),
        "logprob_difference_max": difference.max().item(),
    }


def measure(config: Config, groups: Sequence[Group]) -> dict[str, float]:
    """The numbers behind the findings, as far as they make sense for the configuration."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = sorted(len(rollout.completion.token_ids) for rollout in rollouts)
    measurements = {
        "num_prompts": len(groups),
        "num_completions": len(rollouts),
        "truncated_ratio": _truncated_ratio(groups),
        "mean_length": fmean(lengths),
        "p90_length": float(lengths[-(-9 * len(lengths) // 10) - 1]),
        "max_completion_length": config.rollout.max_completion_length,
    }
    if config.loss.is_supervised and not config.rollout.rejection_sampling:
        return measurements  # given solutions have no scores
    scored = [rollout for rollout in rollouts if rollout.score.failure is None]
    measurements["scoring_failures"] = len(rollouts) - len(scored)
    if any("correct" in rollout.score.parts for rollout in scored):
        measurements["no_answer_ratio"] = fmean(rollout.score.answer is None for rollout in scored)
        measurements["accuracy"] = sum(r.score.parts.get("correct", 0.0) >= 1 for r in scored) / len(rollouts)
    if not config.loss.is_supervised and config.rollout.num_generations > 1:
        measurements["reward_variance_ratio"] = fmean(group.rewards_differ() for group in groups)
    return measurements


def judge(config: Config, groups: Sequence[Group], numbers: dict[str, float]) -> list[Finding]:
    """The findings, in the order in which they are shown; none for what was not measured. What failed comes
    first, and leaves out what only follows from it.
    """
    failed = failures(groups)
    findings = [_failure(config, failure) for failure in failed]
    findings.append(_truncation(config, numbers))
    if "no_answer_ratio" in numbers:
        findings.append(_answers(numbers))
    if config.loss.is_supervised:
        findings += _accepted(config, numbers)
    elif has_learning_signal(groups, config) or not any(failure.is_rule for failure in failed):
        findings.append(_variance(config, groups, numbers))
    if numbers.get("scoring_failures") == 0:
        findings.append(Finding(name="scoring", status=Status.OK, text="no scorer failed"))
    findings.append(_lengths(numbers))
    if "logprob_difference_mean" in numbers:
        findings.append(_logprobs(config, numbers))
    return findings


def _truncation(config: Config, numbers: dict[str, float]) -> Finding:
    ratio, limit = numbers["truncated_ratio"], config.rollout.max_completion_length
    status = Status.OK if ratio < TRUNCATED_WARNING else Status.WARNING
    what = (
        "solutions" if config.loss.is_supervised and not config.rollout.rejection_sampling else "completions"
    )
    return Finding(
        name="truncated",
        status=Status.PROBLEM if ratio > TRUNCATED_STOP else status,
        text=f"{_percent(ratio)} of {numbers['num_completions']:,.0f} {what} are truncated at "
        f"max_completion_length ({limit:,})",
        remedy="" if status is Status.OK else f"Raise max_completion_length, e.g. to {4 * limit:,}.",
    )


def _answers(numbers: dict[str, float]) -> Finding:
    ratio = numbers["no_answer_ratio"]
    if ratio <= NO_ANSWER_WARNING:
        return Finding(name="answers", status=Status.OK, text=f"{_percent(ratio)} have no answer")
    remedy = (
        "Ask for the form of the answer (developer_prompt), pay for it (reward_funcs=[accuracy,format]), or "
        "take an instruct model (model_name_or_path)."
    )
    return Finding(
        name="answers", status=Status.WARNING, text=f"{_percent(ratio)} have no answer", remedy=remedy
    )


def _variance(config: Config, groups: Sequence[Group], numbers: dict[str, float]) -> Finding:
    number = counted(len(groups), "prompt")
    if not has_learning_signal(groups, config):
        reason, remedy = explain_equal_rewards(groups, config)
        text = f"no reward differs on {number}: {reason}"
        return Finding(name="rewards", status=Status.PROBLEM, text=text, remedy=remedy)
    if "reward_variance_ratio" not in numbers:
        return Finding(name="rewards", status=Status.OK, text=f"rewards differ among {number}")
    ratio = numbers["reward_variance_ratio"]
    text = f"rewards differ on {_percent(ratio)} of {number}"
    if ratio >= VARIANCE_WARNING or config.loss.advantage not in ("group", "rloo"):
        return Finding(name="rewards", status=Status.OK, text=text)
    direction = "harder" if numbers.get("accuracy", 0.0) > 0.5 else "easier"
    remedy = f"Raise num_generations, set dynamic_sampling=true, or make the problems {direction} (datasets)."
    return Finding(name="rewards", status=Status.WARNING, text=text, remedy=remedy)


def _accepted(config: Config, numbers: dict[str, float]) -> list[Finding]:
    """Of rejection sampling: how much there is to imitate."""
    if not config.rollout.rejection_sampling:
        return []
    ratio = numbers.get("accuracy", 0.0)
    text = f"{_percent(ratio)} are correct and would be imitated"
    remedy = "" if ratio else "Make the problems easier (datasets), raise num_generations, or give solutions."
    status = Status.OK if ratio else Status.WARNING
    return [Finding(name="correct", status=status, text=text, remedy=remedy)]


def _failure(config: Config, failure: Failure) -> Finding:
    allowed = config.tasks.max_reward_failure_fraction if failure.kind == "scoring" else 0.5
    is_problem = failure.count >= 3 and failure.count > allowed * failure.total
    return Finding(
        name=failure.kind,
        status=Status.PROBLEM if is_problem else Status.WARNING,
        text=failure.text,
        remedy=REMEDIES[failure.kind],
    )


def _lengths(numbers: dict[str, float]) -> Finding:
    text = (
        f"completions have {numbers['mean_length']:,.0f} tokens in the mean, {numbers['p90_length']:,.0f} at "
        f"the 90th percentile (max_completion_length {numbers['max_completion_length']:,.0f})"
    )
    return Finding(name="length", status=Status.OK, text=text)


def _logprobs(config: Config, numbers: dict[str, float]) -> Finding:
    mean, largest = numbers["logprob_difference_mean"], numbers["logprob_difference_max"]
    text = f"logprobs of engine and trainer differ by {mean:.1e} a token in the mean, {largest:.1e} at most"
    bound = logprob_bound(config)
    if bound is not None and not mean <= bound:  # NaN, too: the first step would stop the run
        remedy = (
            "The engine does not sample from the trainer's weights: set weight_transfer=disk or "
            "rollout_engine=native; if it is only less exact, raise max_logprob_difference."
        )
        return Finding(name="logprobs", status=Status.PROBLEM, text=text, remedy=remedy)
    return Finding(name="logprobs", status=Status.OK, text=text)


def _truncated_ratio(groups: Sequence[Group]) -> float:
    return fmean(r.completion.finish is Finish.LENGTH for group in groups for r in group.rollouts)


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.0f} %"
