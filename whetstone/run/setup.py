"""What every run is put together from and leaves behind, whoever trains: our own loop or TRL's.

Problems with their plan, the collector, the metrics; at the end train_results.json, the report and a word to
the user. Samples nothing and moves no weights.
"""

import contextlib
import logging
from pathlib import Path
from typing import Any

from whetstone.config import Config, Plan, flatten, make_plan
from whetstone.engines import make_engine
from whetstone.evaluation.statistics import wilson
from whetstone.model.chat import Chat
from whetstone.model.policy import Policy
from whetstone.parallel.collectives import second_line
from whetstone.parallel.mesh import ALONE, Ranks
from whetstone.rewards.verify import verify
from whetstone.rollout.collector import Collector
from whetstone.rollout.distributed import SharedCollector, SilentScorer
from whetstone.run.checkpoint import Checkpoint
from whetstone.run.metrics import MetricsLog
from whetstone.tasks.mixture import Mixture, build_tasks, check_gold, describe_data, eval_problems
from whetstone.tasks.scoring.pool import Scorer, check_reward_funcs
from whetstone.terminal.stages import stage
from whetstone.types import Problem

FEW_PROBLEMS = 50  # with fewer, the 95 % interval of an accuracy is wider than 27 points
logger = logging.getLogger("whetstone")


def plan_problems(config: Config, ranks: Ranks = ALONE) -> tuple[list[Problem], Mixture, Plan]:
    """The evaluation's problems, those of training, and the plan; every task has accepted its own answers."""
    with stage("making the problems"):
        fixed = eval_problems(config)
        tasks = build_tasks(config, "train", fixed)
    with stage("scoring the tasks' own answers"):
        check_gold(tasks)
        if fixed:
            check_gold(build_tasks(config, "eval"))
    plan = make_plan(config, num_problems=len(tasks), world_size=ranks.data_size)
    for line in (
        *describe_data(tasks.tasks.values()),
        *plan.lines(config, len(fixed)),
        *few_problems(config, len(fixed)),
    ):
        logger.info(line)
    return fixed, tasks, plan


def few_problems(config: Config, num_problems: int) -> list[str]:
    """A warning where an evaluation has too few problems to tell anything."""
    if not 0 < num_problems < FEW_PROBLEMS:
        return []
    low, high = wilson(0.5, num_problems)
    asked = config.evaluation.eval_num_samples
    remedy = f"set eval_num_samples to {2 * FEW_PROBLEMS} or more"
    if num_problems < asked:  # rows are only so many
        remedy = "give more rows, a larger eval_fraction, or an eval_path of their own"
    plural = "problem" if num_problems == 1 else "problems"
    return [
        f"The evaluation has {num_problems} {plural} only, so a measured 50 % may be anything from "
        f"{100 * low:.0f} to {100 * high:.0f} %: {remedy}."
    ]


def make_scorer(config: Config, ranks: Ranks = ALONE) -> Any:
    """Of ranks that decode the same tokens the first scores them. Reward functions of the user's own that
    can't be imported are refused here, before a model is loaded.
    """
    check_reward_funcs(config)
    verify(config.tasks.reward_funcs)
    return Scorer(config) if ranks.is_first_of_tp else SilentScorer()


def make_collector(
    config: Config, policy: Policy, scorer: Any, stack: contextlib.ExitStack
) -> SharedCollector:
    """The road from problems to scored groups, on the engine that the configuration names, on all ranks."""
    engine = make_engine(config, policy)
    stack.callback(engine.close)
    collector = Collector(
        engine,
        scorer,
        Chat(policy.tokenizer, config.model),
        max_prompt_length=config.rollout.max_prompt_length,
        max_length=policy.max_length,
    )
    ahead = config.rollout.async_rollouts > 0
    line = second_line(policy.ranks, config.parallel.collective_timeout_s) if ahead else None
    return SharedCollector(collector, policy.ranks, line)


def open_metrics(
    config: Config,
    folder: Path,
    found: Checkpoint | None,
    stack: contextlib.ExitStack,
    *,
    speaks: bool = True,
) -> MetricsLog:
    metrics = MetricsLog(
        folder,
        report_to=config.run.report_to if speaks else [],
        project=config.run.wandb_project,
        run_name=config.run.wandb_name or config.run.run_name or folder.name,
        config=flatten(config),
        logging_steps=config.run.logging_steps,
        logging_first_step=config.run.logging_first_step,
        resume_step=None if found is None else found.step,
    )
    stack.callback(metrics.close)
    return metrics
