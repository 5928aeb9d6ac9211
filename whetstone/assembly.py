"""What every run is put together from and leaves behind, whoever trains: our own loop or TRL's.

Problems with their plan, the collector, the metrics; at the end train_results.json, the report and a word to
the user. Samples nothing and moves no weights.
"""

import contextlib
import json
import logging
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from whetstone.advice.explain import diagnose, read_story
from whetstone.checkpoint import Checkpoint
from whetstone.config import Config, Plan, flatten, make_plan
from whetstone.engines import make_engine
from whetstone.evaluate import EvalResult, percent, plain, read_summary
from whetstone.metrics import MetricsLog, read_rows, write_aside
from whetstone.model.card import ADAPTER_CONFIG, write_final_card
from whetstone.model.chat import Chat
from whetstone.model.policy import Policy
from whetstone.parallel.collectives import second_line
from whetstone.parallel.mesh import ALONE, Ranks
from whetstone.report import write_report
from whetstone.rewards.verify import verify
from whetstone.rollout import Collector
from whetstone.sharing import SharedCollector, SilentScorer
from whetstone.stages import stage
from whetstone.statistics import Accuracy, wilson
from whetstone.tasks.mixture import Mixture, build_tasks, check_gold, describe_data, eval_problems
from whetstone.tasks.scoring import Scorer, check_reward_funcs
from whetstone.text import counted
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
        remedy = "give more rows, a larger eval_share, or an eval_path of their own"
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


def conclude(folder: Path, after: EvalResult | None, *, steps: int, seconds: float) -> dict[str, Any]:
    """Write train_results.json and the report of a run whose final model is saved, and say where they are."""
    results: dict[str, Any] = {"steps": steps, "seconds": round(seconds, 1)}
    before = read_summary(folder / "eval_results" / "eval_step_0.json")
    if after is not None and before is not None:
        summary = after.summary()
        results |= {
            "accuracy_before": before["accuracy"],
            "accuracy_after": summary["accuracy"],
            "greedy_before": before["greedy_accuracy"],
            "greedy_after": summary["greedy_accuracy"],
            "eval_temperature": after.temperature,
            "reward_before": before.get("reward"),
            "reward_after": summary["reward"],
            "is_judged": after.is_judged,
            "versus_start": summary["versus_start"],
        }
    write_aside(folder / "train_results.json", json.dumps(results, indent=1))
    write_final_card(folder, results)
    with stage("writing the report"):
        report = write_report(folder)
    _say_goodbye(folder, results, report)
    return results


def failed_scores(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line on answers of training that could not be scored; none where all were."""
    counts = [int(row.get("scoring_failures", 0)) for row in rows]
    failed, steps = sum(counts), sum(count > 0 for count in counts)
    if not failed:
        return []
    return [
        f"Scoring failed on {counted(failed, 'answer')} in {counted(steps, 'step')} (timeout, crash or "
        "error): these earned nothing. The files in completions/ name the reasons."
    ]


def _say_goodbye(folder: Path, results: dict[str, Any], report: Path) -> None:
    """Before and after, and where everything is."""
    if "accuracy_after" in results:
        problems, temperature = results["accuracy_after"]["num_problems"], results["eval_temperature"]
        logger.info(f"On {counted(problems, 'problem')} it never trained on, with 95 % intervals:")
        for when in ("before", "after"):
            sampled, greedy = Accuracy(**results[f"accuracy_{when}"]), results[f"greedy_{when}"]
            if not results["is_judged"]:
                told = plain(Accuracy(**results[f"reward_{when}"]))
                logger.info(f"  {when:7s} reward {told} at temperature {temperature:g}")
                continue
            line = f"  {when:7s} {percent(sampled)} at temperature {temperature:g}"
            logger.info(line + (f", greedy {percent(Accuracy(**greedy))}" if greedy else ""))
    logger.info(f"{counted(results['steps'], 'step')} in {results['seconds']:.0f} s.")
    logger.info(f"The model is in {folder / 'final_model'}.")
    if (folder / "final_model" / ADAPTER_CONFIG).is_file():
        logger.info("It is a LoRA adapter: README.md beside it says how to load it, merge it and serve it.")
    logger.info(f"The report is {report}: open it in a browser.")
    rows = [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "train"]
    for line in failed_scores(rows):
        logger.info(line)
    if rows:
        verdict = diagnose(*read_story(folder))[0]
        logger.info(f"Verdict: {verdict.title}. {verdict.remedy}")
    logger.info("Next:")
    run, model = shlex.quote(str(folder)), shlex.quote(str(folder / "final_model"))
    logger.info(f"  whet explain {run}")
    logger.info(f"  whet eval checkpoint_path={model}")
