"""Build the parts, then the loop: problems -> collect -> advantages -> pack -> update -> evaluate? ->
checkpoint? -> log.

`train` runs a configuration from wherever its checkpoint left it; `evaluate_only` measures a model and stops.
A step's problems and samples are functions of (seed, step), so the loop needs no state but the step. Where a
launcher started several ranks, all of them run this file alike; only the first speaks and writes to the run
folder, the others write to a scratch folder of their own.
"""

import contextlib
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich
import torch

from whetstone import seeds
from whetstone.config import Config, LoadedConfig, Plan, ineffective_settings
from whetstone.errors import UserError
from whetstone.evaluation.evaluator import EvalResult, Evaluator, show
from whetstone.evaluation.folder import evaluation_folder, step_of, title_of
from whetstone.model.loading import verify_folder
from whetstone.model.policy import Policy, choose_device
from whetstone.model.reference import Reference
from whetstone.model.sharded import load_spread, model_writer
from whetstone.parallel import mesh
from whetstone.parallel.collectives import any_of
from whetstone.parallel.heartbeat import Watch
from whetstone.parallel.mesh import Ranks
from whetstone.report.results import write_results
from whetstone.rollout.async_source import Ahead
from whetstone.rollout.collector import Groups, Round, rollout_metrics, variance_metrics
from whetstone.rollout.learning_signal import LearningSignal
from whetstone.rollout.logprob_check import check_sync
from whetstone.run.checkpoint import Checkpoint, Contents, Saver, save_model
from whetstone.run.completions import show_variance, write_completions
from whetstone.run.folder import check_plan, open_run, path_of, plan_shape, scratch_folder
from whetstone.run.metrics import MetricsLog
from whetstone.run.progress import Progress
from whetstone.run.record import record_session
from whetstone.run.setup import make_collector, make_scorer, open_metrics, plan_problems
from whetstone.run.signals import StopRequest
from whetstone.run.timing import Meter
from whetstone.tasks.mixture import eval_problems, sandbox_notes
from whetstone.terminal.log import log_ending, setup_logging
from whetstone.terminal.stages import stage
from whetstone.types import Group
from whetstone.update.packing import Batch, minibatches
from whetstone.update.updater import Updater

logger = logging.getLogger("whetstone")


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the loop works with."""

    config: Config
    plan: Plan
    ranks: Ranks
    folder: Path
    saver: Saver
    policy: Policy
    groups: Groups
    signal: LearningSignal
    updater: Updater
    evaluator: Evaluator | None
    metrics: MetricsLog
    meter: Meter


def train(loaded: LoadedConfig) -> dict[str, Any]:
    """Run a configuration to its end, or to a stop that was asked for; returns what train_results.json
    holds.
    """
    config = loaded.config
    if config.evaluation.eval_only:
        return evaluate_only(loaded)
    if config.run.trainer == "trl":
        from whetstone.trl import train_with_trl

        return train_with_trl(loaded)
    with contextlib.ExitStack() as stack:
        parts, found, seconds_before = build(loaded, meet(config, stack), stack)
        begun = time.monotonic() - seconds_before
        if found is None:
            evaluate(parts, 0)
        step = loop(parts, 0 if found is None else found.step, begun)
        parts.saver.finish()
        if step < parts.plan.num_steps:
            logger.info(f"Stopped at step {step}, saved. Go on with the same command and auto_resume=true.")
            raise KeyboardInterrupt
        return _finish(parts, time.monotonic() - begun)


def loop(parts: Parts, step: int, begun: float) -> int:
    """The algorithm. Returns the optimiser step it ended at."""
    config, plan = parts.config, parts.plan
    progress = Progress(
        plan.num_steps,
        start_step=step,
        logging_steps=config.run.logging_steps,
        logging_first_step=config.run.logging_first_step,
    )
    stopping = False
    with progress, StopRequest(is_launched=mesh.is_launched(), speaks=parts.ranks.is_main) as stop:
        while step < plan.num_steps and not stopping:
            clock = parts.meter.start()
            with clock("rollout"):
                made = parts.groups.of(step)
            with clock("update"):
                seed = seeds.seed(config.run.seed, "update", step)
                batches = shares(parts, made.groups, seed)
                row = parts.updater.step(batches, seed)
            check_sync(row, config, made.row["staleness"])
            step += plan.updates_per_batch
            row |= describe(parts, step, made) | parts.meter.row(made, batches)
            progress.update(step, row)
            with clock("eval"):
                if plan.is_due(plan.eval_every, step) and step < plan.num_steps:
                    evaluate(parts, step)
            parts.metrics.log(step, row | parts.meter.row(made, batches))
            stopping = any_of(parts.ranks, stop.requested)
            if plan.is_due(plan.save_every, step) or stopping:
                save(parts, step, time.monotonic() - begun)
    return step


def meet(config: Config, stack: contextlib.ExitStack) -> Ranks:
    """Meet the other ranks of the launch, if there are any; until `stack` closes, a failure of one ends
    all.
    """
    with stage("waiting for the other ranks") if mesh.is_launched() else contextlib.nullcontext():
        ranks = stack.enter_context(mesh.start(config.parallel, choose_device(config.model.device).type))
    stack.enter_context(Watch(ranks, config.parallel.heartbeat_timeout_s))
    in_our_processes = config.rollout.rollout_engine not in ("vllm", "sglang")
    if ranks.world_size > 1 and config.rollout.async_rollouts and in_our_processes:
        raise UserError(
            "async_rollouts: 1 on several ranks needs rollout servers, for the engine "
            f"{config.rollout.rollout_engine} would sample on devices that train meanwhile: set "
            "rollout_engine=vllm (or sglang), or async_rollouts=0."
        )
    return ranks


def shares(parts: Parts, groups: list[Group], seed: int) -> list[list[Batch]]:
    """This rank's micro-batches of everybody's groups."""
    ranks, plan = parts.ranks, parts.plan
    return minibatches(
        groups,
        parts.config,
        plan.minibatches,
        seed,
        max_tokens=parts.updater.micro_batch_tokens(groups),
        rank=ranks.data_rank,
        num_ranks=ranks.data_size,
    )


def build(
    loaded: LoadedConfig, ranks: Ranks, stack: contextlib.ExitStack
) -> tuple[Parts, Checkpoint | None, float]:
    """Every part of a run, the checkpoint it goes on from, and the seconds it had run before that."""
    config = loaded.config
    folder, found, notes = open_run(config, ranks, is_restart=mesh.restarts() > 0, say=rich.print)
    folder = folder if ranks.is_main else stack.enter_context(scratch_folder())
    setup_logging(folder, is_main=ranks.is_main)
    stack.push(log_ending)
    record_session(folder, resumed_from=None if found is None else found.step, num_ranks=ranks.world_size)
    for note in (*loaded.notes, *notes):
        logger.info(note)
    torch.manual_seed(config.run.seed)  # a new LoRA adapter begins with random numbers
    problems, tasks, plan = plan_problems(config, ranks)
    numbers = {} if found is None else found.numbers()
    if found is not None:
        check_plan(found, numbers, plan)
    for line in (*describe_ranks(ranks), *ineffective_settings(config, plan), *sandbox_notes(tasks)):
        logger.info(line)
    scorer = stack.enter_context(make_scorer(config, ranks))  # its processes start while the model loads
    with stage("loading the model"):
        policy = load_spread(config.model, config.parallel, ranks, None if found is None else found.folder)
        logger.info(describe_model(policy, config))
        updater = Updater(policy, config, plan, make_reference(config, policy, found))
        if found is not None:
            restore(updater, found, numbers)
    with stage(f"starting the engine {config.rollout.rollout_engine}"):
        collector = make_collector(config, policy, scorer, stack)
    groups = (Ahead if config.rollout.async_rollouts else Groups)(collector, tasks, config, plan)
    stack.callback(groups.close)
    if found is not None:
        groups.load_state(numbers["groups"])
    parts = Parts(
        config=config,
        plan=plan,
        ranks=ranks,
        folder=folder,
        saver=make_saver(config, ranks, found),
        policy=policy,
        groups=groups,
        signal=LearningSignal(config),
        updater=updater,
        evaluator=Evaluator(config, problems, collector, folder) if problems else None,
        metrics=open_metrics(config, folder, found, stack, speaks=ranks.is_main),
        meter=Meter(policy, num_iterations=plan.num_iterations, peak_tflops=config.measure.peak_tflops),
    )
    stack.callback(parts.saver.finish)
    return parts, found, numbers.get("seconds", 0.0)


def make_saver(config: Config, ranks: Ranks, found: Checkpoint | None) -> Saver:
    run = path_of(config)
    saved = found.step if found is not None and found.folder.resolve().parent == run.resolve() else None
    return Saver(run, config.run.save_total_limit, ranks, saved)


def restore(updater: Updater, found: Checkpoint, numbers: dict[str, Any]) -> None:
    """Put the updater where the checkpoint left it; `numbers` are all of the checkpoint's."""
    tensors = updater.tensors()
    found.load_tensors(tensors)
    updater.load_tensors(tensors)
    updater.load_numbers(numbers["updater"])


def make_reference(config: Config, policy: Policy, found: Checkpoint | None) -> Reference | None:
    """Whom the KL compares with; a resumed run needs the first weights again, not its checkpoint's."""
    loss = config.loss
    if loss.beta == 0 or loss.kl_reference == "rollout":
        return None
    moving = loss.kl_reference == "moving"  # its weights are in the checkpoint
    again = found is not None and not moving and not policy.is_lora
    first = load_spread(config.model, config.parallel, policy.ranks) if again else policy
    offload = config.parallel.cpu_offload != "none" and policy.device.type == "cuda"
    return Reference.of(policy, first, moving=moving, offload=offload)


def describe(parts: Parts, step: int, made: Round) -> dict[str, float]:
    """The numbers of a step's rollouts; its completions go to the folder, and to the terminal where asked
    for.
    """
    run, plan, groups = parts.config.run, parts.plan, made.groups
    if plan.is_due(run.log_completions_steps, step) or step == plan.updates_per_batch:
        write_completions(parts.folder, step, groups)
    if run.verbose_variance_logging:
        show_variance(groups)
    parts.signal.observe(groups)
    row = rollout_metrics(groups)
    if run.log_reward_variance:
        row |= variance_metrics(groups)
    return {**row, **made.row}


def describe_ranks(ranks: Ranks) -> list[str]:
    """How the ranks share the work, in words; nothing for a process alone."""
    if ranks.mesh is None or ranks.world_size == 1:
        return []
    replicas, num_shards, tp = ranks.mesh.size(0), ranks.mesh.size(1), ranks.mesh.size(2)
    text = f"{ranks.world_size} ranks: weights in {num_shards} shards"
    text += f" x {tp} tensor-parallel parts" if tp > 1 else ""
    return [text + (f", {replicas} replicas" if replicas > 1 else "")]


def describe_model(policy: Policy, config: Config) -> str:
    total = sum(parameter.numel() for parameter in policy.model.parameters())
    trained = sum(parameter.numel() for parameter in policy.parameters)
    precision = str(policy.dtype).removeprefix("torch.")
    name = config.model.model_name_or_path
    text = f"{name}: {total:,} parameters, {trained:,} trained, {precision} on {policy.device}"
    if config.model.bf16 and policy.device.type == "cpu":
        text += " (bf16 was asked for, but float32 is faster on a CPU)"
    return text


def evaluate(parts: Parts, step: int) -> EvalResult | None:
    """The fixed evaluation: greedy as well at the start and the end."""
    if parts.evaluator is None:
        return None
    ends = step in (0, parts.plan.num_steps)
    parts.groups.settle(step)
    result = parts.evaluator.run(step, greedy=ends and parts.config.evaluation.eval_greedy)
    parts.metrics.log_eval(step, result.row())
    show(result, num_examples=parts.config.evaluation.eval_num_examples_to_print)
    return result


def save(parts: Parts, step: int, seconds: float) -> None:
    if parts.saver.has(step):
        return
    with stage("saving a checkpoint"):
        updater, groups = parts.updater, parts.groups.state()
        parts.saver.save(
            Contents(
                step=step,
                write_model=model_writer(parts.policy),
                tensors=updater.tensors(),
                numbers={
                    "updater": updater.numbers(),
                    "groups": groups,
                    "seconds": seconds,
                    "plan": plan_shape(parts.plan),
                },
            )
        )


def _finish(parts: Parts, seconds: float) -> dict[str, Any]:
    """The last evaluation, the final model, train_results.json and the report."""
    after = evaluate(parts, parts.plan.num_steps)
    if parts.config.run.save_strategy != "no":
        save(parts, parts.plan.num_steps, seconds)
    with stage("saving the model"):
        write_model = model_writer(parts.policy)
        parts.saver.finish()
        if not parts.ranks.is_main:
            return {}
        parts.saver.remove_old()  # a run that was killed may have left one too many
        save_model(write_model, parts.folder / "final_model", parts.plan.num_steps)
    return write_results(parts.folder, after, steps=parts.plan.num_steps, seconds=seconds)


def evaluate_only(loaded: LoadedConfig) -> dict[str, Any]:
    """Measure `checkpoint_path` (or the model itself) on the fixed problems."""
    config = loaded.config
    problems = eval_problems(config)
    if not problems:
        raise UserError("There is nothing to evaluate: set eval_num_samples to how many problems you want.")
    weights = config.evaluation.checkpoint_path
    if weights is not None and not Path(weights).is_dir():
        raise UserError(
            f"checkpoint_path: there is no folder '{weights}': give a checkpoint-N or final_model folder."
        )
    if weights is not None:
        verify_folder(Path(weights))
    with contextlib.ExitStack() as stack:
        ranks = meet(config, stack)
        folder = evaluation_folder(config) if ranks.is_main else stack.enter_context(scratch_folder())
        setup_logging(folder, is_main=ranks.is_main, name="evaluation.log")
        stack.push(log_ending)
        record_session(folder, num_ranks=ranks.world_size)
        for note in loaded.notes:
            logger.info(note)
        scorer = stack.enter_context(make_scorer(config, ranks))
        with stage("loading the model"):
            policy = load_spread(config.model, config.parallel, ranks, weights)
            logger.info(describe_model(policy, config))
            collector = make_collector(config, policy, scorer, stack)
            collector.engine.update_weights(0)
        evaluator = Evaluator(config, problems, collector, folder)
        step = None if weights is None else step_of(Path(weights))
        result = evaluator.run(step or 0, greedy=config.evaluation.eval_greedy)
        show(result, title=title_of(config), num_examples=config.evaluation.eval_num_examples_to_print)
        logger.info(f"Every completion and score is in {folder / 'eval_results'}.")
    return result.summary()
