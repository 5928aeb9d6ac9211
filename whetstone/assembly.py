"""What every run is put together from and leaves behind, whoever trains: our own loop or TRL's.

Problems with their plan, the collector, the metrics; at the end train_results.json, the report and a word to
the user. Samples nothing and moves no weights.
"""

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

from whetstone.checkpoint import Checkpoint
from whetstone.config import Config, Plan, flatten, make_plan
from whetstone.engines import make_engine
from whetstone.evaluate import EvalResult, percent
from whetstone.metrics import MetricsLog, write_aside
from whetstone.model.card import ADAPTER_CONFIG, write_final_card
from whetstone.model.chat import Chat
from whetstone.model.policy import Policy
from whetstone.parallel.collectives import second_line
from whetstone.parallel.mesh import ALONE, Ranks
from whetstone.report import write_report
from whetstone.rollout import Collector
from whetstone.sharing import SharedCollector, SilentScorer
from whetstone.statistics import Accuracy
from whetstone.tasks.mixture import Mixture, build_tasks, check_gold, eval_problems
from whetstone.tasks.scoring import Scorer
from whetstone.types import Problem

logger = logging.getLogger("whetstone")


def plan_problems(config: Config, ranks: Ranks = ALONE) -> tuple[list[Problem], Mixture, Plan]:
    """The evaluation's problems, those of training, and the plan; every task has accepted its own answers."""
    fixed = eval_problems(config)
    tasks = build_tasks(config, "train", fixed)
    check_gold(tasks)
    if fixed:
        check_gold(build_tasks(config, "eval"))
    plan = make_plan(config, num_problems=len(tasks), world_size=ranks.data_size)
    for line in plan.lines(config):
        logger.info(line)
    return fixed, tasks, plan


def make_scorer(config: Config, ranks: Ranks = ALONE) -> Any:
    """Of ranks that decode the same tokens the first scores them."""
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
    start = folder / "eval_results" / "eval_step_0.json"
    if after is not None and start.is_file():
        before = json.loads(start.read_text(encoding="utf-8"))["summary"]
        summary = after.summary()
        results |= {
            "accuracy_before": before["accuracy"],
            "accuracy_after": summary["accuracy"],
            "greedy_before": before["greedy_accuracy"],
            "greedy_after": summary["greedy_accuracy"],
            "eval_temperature": after.temperature,
            "versus_start": summary["versus_start"],
        }
    write_aside(folder / "train_results.json", json.dumps(results, indent=1))
    write_final_card(folder, results)
    _say_goodbye(folder, results, write_report(folder))
    return results


def _say_goodbye(folder: Path, results: dict[str, Any], report: Path) -> None:
    """Before and after, and where everything is."""
    if "accuracy_after" in results:
        logger.info("")
        problems, temperature = results["accuracy_after"]["num_problems"], results["eval_temperature"]
        logger.info(f"On {problems} problems it never trained on, with 95 % intervals:")
        for when in ("before", "after"):
            sampled, greedy = Accuracy(**results[f"accuracy_{when}"]), results[f"greedy_{when}"]
            line = f"  {when:7s} {percent(sampled)} at temperature {temperature:g}"
            logger.info(line + (f", greedy {percent(Accuracy(**greedy))}" if greedy else ""))
    logger.info(f"{results['steps']} steps in {results['seconds']:.0f} s.")
    logger.info(f"The model is in {folder / 'final_model'}.")
    if (folder / "final_model" / ADAPTER_CONFIG).is_file():
        logger.info("It is a LoRA adapter: README.md beside it says how to load it, merge it and serve it.")
    logger.info(f"The report is {report}: open it in a browser.")
