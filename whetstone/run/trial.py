"""The trial of the user's own code before a model is loaded: an episode of each environment with one turn,
and one call of each reward function. What fails here would fail in every rollout.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

from whetstone.config import Config
from whetstone.config.plugins import is_plugin
from whetstone.environments.pool import EpisodePool
from whetstone.errors import UserError
from whetstone.parallel.collectives import broadcast_from_main
from whetstone.parallel.mesh import Ranks
from whetstone.rollout.failures import REMEDIES
from whetstone.tasks.mixture import Mixture
from whetstone.tasks.scoring.process import ScoringRequest
from whetstone.terminal.findings import Finding, Status
from whetstone.terminal.stages import stage
from whetstone.types import Problem

TURN = "This is a trial."
OpenPool = Callable[[Config, list[str]], EpisodePool]
logger = logging.getLogger("whetstone")


def check_own_code(config: Config, tasks: Mixture, scorer: Any, ranks: Ranks, open_pool: OpenPool) -> None:
    """`try_own_code` for a run: what fails for sure stops it, unless `preflight` says otherwise."""
    findings = try_own_code(config, tasks, scorer, ranks, open_pool)
    problems = [f"{f.text}. {f.remedy}" for f in findings if f.status is Status.PROBLEM]
    if problems and config.run.preflight == "stop":
        raise UserError(f"The trial of your own code failed: {' '.join(problems)}")
    for finding in findings:
        logger.warning(f"In the trial of your own code {finding.text}. {finding.remedy}")


def try_own_code(
    config: Config, tasks: Mixture, scorer: Any, ranks: Ranks, open_pool: OpenPool
) -> list[Finding]:
    """What failed, the same on all ranks. An exception of `step` is a warning: the turn may explain it."""
    if config.run.preflight == "off":
        return []
    findings: list[Finding] = []
    if ranks.is_main:
        with stage("trying environments and reward functions"):
            problems = [task.problem(0) for task in tasks.tasks.values()]
            for problem in problems:
                if problem.environment is not None and is_plugin(problem.environment):
                    with open_pool(config, [problem.environment]) as pool:
                        findings += _try_environment(pool, problem, problem.environment)
            if any(map(is_plugin, config.tasks.reward_funcs)):  # those of an episode need its state
                findings += _try_rewards(scorer, tasks, [p for p in problems if p.environment is None])
    return broadcast_from_main(ranks, findings)


def _try_environment(pool: EpisodePool, problem: Problem, name: str) -> list[Finding]:
    row = problem.answer
    for part, begin in (
        ("reset", lambda: pool.start(0, name, row.get("settings", {}), row["seed"], row.get("row", {}))),
        ("its first turn", lambda: pool.step(0, TURN)),
        ("get_reward", lambda: pool.finish(0)),
    ):
        begin()
        answers, deadline = pool.poll(1.0), time.monotonic() + pool.timeout_s + 5
        while not answers and time.monotonic() < deadline:
            answers = pool.poll(1.0)
        error = answers[0].error if answers else f"no answer in {pool.timeout_s:g} s"
        if error is not None:
            is_certain = part != "its first turn" or error.startswith("EnvironmentFailed")
            text = f"{name} failed in {part}: {error}"
            return [_finding("environment", text, is_certain)]
    return []


def _try_rewards(scorer: Any, tasks: Mixture, problems: list[Problem]) -> list[Finding]:
    """A right answer to each problem, where one is known: a function that fails on all of these is wrong."""
    golds = [tasks.tasks[problem.task].gold(problem) for problem in problems]
    with scorer.probing():
        for problem, gold in zip(problems, golds, strict=True):
            text = TURN if gold is None else gold
            scorer.submit(ScoringRequest(problem=problem, text=text, completion_ids=(0,), truncated=False))
        failed = [score.failure for score in scorer.gather()]
    reasons = [reason for reason in failed if reason is not None]
    if not reasons:
        return []
    right = [reason for gold, reason in zip(golds, failed, strict=True) if gold is not None]
    text = f"scoring failed on {len(reasons)} of {len(failed)} trial answers (first: {reasons[0]})"
    return [_finding("scoring", text, bool(right) and None not in right)]


def _finding(kind: str, text: str, is_certain: bool) -> Finding:
    status = Status.PROBLEM if is_certain else Status.WARNING
    return Finding(name=kind, status=status, text=text, remedy=REMEDIES[kind])
