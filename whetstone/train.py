"""The training loop: rollouts, experience, update, weights to the engine, evaluation, checkpoint, metrics.

Problems and samples of a step are functions of (seed, step), so the loop has no state but the step. All ranks
of a launch run this file; only the first prints and writes to the run folder.
"""

import contextlib
import importlib
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from whetstone import seeds
from whetstone.config import LoadedConfig
from whetstone.evaluation.display import print_result
from whetstone.export.push import push_final
from whetstone.model.sharded import model_writer
from whetstone.parallel import mesh
from whetstone.parallel.collectives import all_gather_objects
from whetstone.report.results import write_results
from whetstone.rollout.metrics import check_logprob_difference
from whetstone.run.checkpoint import CheckpointData
from whetstone.run.completions import log_rollouts
from whetstone.run.eval_only import evaluate_only
from whetstone.run.folder import how_to_resume, plan_shape
from whetstone.run.metrics import with_own
from whetstone.run.preflight import preflight
from whetstone.run.progress import Progress
from whetstone.run.setup import TrainingRun, build, init_distributed
from whetstone.run.sft_start import start_from_sft
from whetstone.run.signals import StopRequest
from whetstone.terminal.stages import stage
from whetstone.types import Group

logger = logging.getLogger("whetstone")


def train(loaded: LoadedConfig) -> dict[str, Any]:
    """Run a configuration to its end or to a requested stop; returns the content of train_results.json."""
    config = loaded.config
    if config.evaluation.eval_only:
        return evaluate_only(loaded)
    if config.update.sft_steps:
        loaded = start_from_sft(loaded, train)
    with open_training(loaded) as (run, step, started_at):
        for done in loop(run, step, started_at):
            step = done.step
        return finish(run, step, time.monotonic() - started_at)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What an iteration of the loop leaves to look at."""

    step: int  # optimizer steps so far
    metrics: dict[str, float]  # its row of metrics.jsonl
    groups: list[Group]  # the rollouts that it trained on, by problem


@contextlib.contextmanager
def open_training(loaded: LoadedConfig) -> Iterator[tuple[TrainingRun, int, float]]:
    """The run, the step that it starts at, and when it would have started without interruptions."""
    with contextlib.ExitStack() as stack:
        run, checkpoint, seconds_before = build(loaded, init_distributed(loaded.config, stack), stack)
        started_at = time.monotonic() - seconds_before
        if checkpoint is None:
            preflight(run.config, run.source, run.policy, run.folder)
            evaluate(run, 0)
        yield run, 0 if checkpoint is None else checkpoint.step, started_at


def loop(run: TrainingRun, step: int, started_at: float) -> Iterator[Step]:
    """The algorithm, from optimizer step `step` on."""
    config, plan = run.config, run.plan
    progress = Progress(
        plan.num_steps,
        start_step=step,
        logging_steps=config.run.logging_steps,
    )
    stopping = False
    with progress, StopRequest(is_launched=mesh.is_launched(), verbose=run.ranks.is_main) as stop:
        while step < plan.num_steps and not stopping:
            timer = run.throughput.start_step()
            with timer("rollout"):
                run.source.sync_weights(step)
                rollouts = run.source.next_batch(step)
            with timer("update"):
                seed = seeds.seed(config.run.seed, "update", step)
                batches = run.updater.pack(rollouts.groups, seed)
                experience = run.updater.prepare(batches)  # old and reference logprobs, values, advantages
                metrics = run.updater.update(experience, seed)
            check_logprob_difference(metrics, config, rollouts.metrics["staleness"])
            step += plan.updates_per_batch
            metrics |= log_rollouts(run.folder, step, rollouts.groups, config, plan, run.learning_signal)
            run.token_log.write(step, rollouts.groups)
            metrics |= rollouts.metrics | run.throughput.metrics(rollouts, batches)
            progress.update(step, metrics)
            with timer("eval"):
                if plan.is_due(plan.eval_every, step) and step < plan.num_steps:
                    evaluate(run, step)
            metrics |= run.throughput.metrics(rollouts, batches) | run.resources.metrics(step)
            metrics = with_own(metrics, rollouts.own_metrics)
            run.metrics.log(step, metrics)
            stopping = any(all_gather_objects(run.ranks, stop.requested))
            if plan.is_due(plan.save_every, step) or stopping:
                save(run, step, time.monotonic() - started_at)
            yield Step(step=step, metrics=metrics, groups=rollouts.groups)


def evaluate(run: TrainingRun, step: int) -> None:
    """The fixed evaluation; also greedy at the start and the end."""
    if run.evaluator is None:
        return
    is_end = step in (0, run.plan.num_steps)
    run.source.sync_weights(step)
    result = run.evaluator.run(step, greedy=is_end and run.config.evaluation.eval_greedy)
    run.metrics.log_eval(step, result.metrics())
    run.best_model.observe(step, result)
    print_result(result, num_examples=run.config.evaluation.eval_num_examples_to_print)


def save(run: TrainingRun, step: int, seconds: float) -> None:
    """Write a checkpoint in the background."""
    if run.saver.has(step):
        return
    with stage("saving a checkpoint"):
        source = run.source.state()  # first: it waits for a batch that is being sampled
        run.saver.save(
            CheckpointData(
                step=step,
                write_model=model_writer(run.policy),
                tensors=run.updater.state_tensors(),
                scalars={
                    "updater": run.updater.state_scalars(),
                    "source": source,
                    "seconds": seconds,
                    "plan": plan_shape(run.plan),
                },
            )
        )


def finish(run: TrainingRun, step: int, seconds: float) -> dict[str, Any]:
    """The last evaluation, the final model, train_results.json, the report, and the push to the hub."""
    run.saver.finish()
    if step < run.plan.num_steps:
        logger.info(f"Stopped at step {step}, saved. {how_to_resume(run.config)}")
        raise KeyboardInterrupt
    evaluate(run, step)
    if run.config.run.save_strategy != "no":
        save(run, step, seconds)
    with stage("saving the model"):
        write_model = model_writer(run.policy)
        run.saver.finish()
        if not run.ranks.is_main:
            return {}
        run.saver.remove_old()  # a killed run may have left one too many
        model_step = run.best_model.publish(write_model, run.folder / "final_model", step)
    results = write_results(run.folder, steps=step, model_step=model_step, seconds=seconds)
    push_final(run.config, run.folder)
    return results


def _call(_: ModuleType, *args: Any, **settings: Any) -> Any:
    return importlib.import_module("whetstone.api").train(*args, **settings)


# `whetstone.train` is this module, and the function of the API.
sys.modules[__name__].__class__ = type("CallableModule", (ModuleType,), {"__call__": _call})
