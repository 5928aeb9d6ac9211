"""Build the parts, then the loop: problems -> collect -> advantages -> pack -> update -> evaluate? ->
checkpoint? -> log.

`train` runs a configuration from wherever its checkpoint left it; `evaluate_only` measures a model and stops.
A step's problems and samples are functions of (seed, step), so the loop needs no state but the step.
"""

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from whetstone import seeds
from whetstone.ahead import Ahead
from whetstone.assembly import conclude, make_collector, open_metrics, plan_problems
from whetstone.batch import minibatches
from whetstone.checkpoint import Checkpoint, save_checkpoint, save_model
from whetstone.completions import show_variance, write_completions
from whetstone.config import Config, Loaded, Plan, without_effect
from whetstone.errors import UserError
from whetstone.evaluate import EvalResult, Evaluator, show
from whetstone.metrics import MetricsLog, setup_logging
from whetstone.model.policy import Policy, load_policy
from whetstone.model.reference import Reference
from whetstone.progress import Progress
from whetstone.rollout import Groups, Round, rollout_metrics, variance_metrics
from whetstone.run_folder import open_run, path_of
from whetstone.stopping import StopRequest
from whetstone.sync_check import check_sync
from whetstone.tasks.mixture import eval_problems, sandbox_notes
from whetstone.tasks.scoring import Scorer
from whetstone.update import Updater

logger = logging.getLogger("whetstone")


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the loop works with."""

    config: Config
    plan: Plan
    folder: Path
    policy: Policy
    groups: Groups
    updater: Updater
    evaluator: Evaluator | None
    metrics: MetricsLog


def train(loaded: Loaded) -> dict[str, Any]:
    """Run a configuration to its end, or to a stop that was asked for; returns what train_results.json
    holds.
    """
    config = loaded.config
    if config.evaluation.eval_only:
        return evaluate_only(loaded)
    if config.run.trainer == "trl":
        from whetstone.trl import train_with_trl

        return train_with_trl(loaded)
    folder, found, notes = open_run(config)
    setup_logging(folder)
    for note in (*loaded.notes, *notes):
        logger.info(note)
    with contextlib.ExitStack() as stack:
        parts, seconds_before = build(config, folder, found, stack)
        begun = time.monotonic() - seconds_before
        if found is None:
            evaluate(parts, 0)
        step = _loop(parts, 0 if found is None else found.step, begun)
        if step < parts.plan.num_steps:
            logger.info(f"Stopped at step {step}, saved. Go on with the same command and auto_resume=true.")
            raise KeyboardInterrupt
        return _finish(parts, time.monotonic() - begun)


def _loop(parts: Parts, step: int, begun: float) -> int:
    """The algorithm. Returns the optimiser step it ended at."""
    config, plan = parts.config, parts.plan
    progress = Progress(
        plan.num_steps,
        start_step=step,
        logging_steps=config.run.logging_steps,
        logging_first_step=config.run.logging_first_step,
    )
    with progress, StopRequest() as stop:
        while step < plan.num_steps and not stop.requested:
            clock = Clock()
            with clock("rollout"):
                made = parts.groups.of(step)
            with clock("update"):
                seed = seeds.seed(config.run.seed, "update", step)
                row = parts.updater.step(minibatches(made.groups, config, plan.minibatches, seed), seed)
            check_sync(row, config, made.row["staleness"])
            step += plan.updates_per_batch
            row |= describe(parts, step, made)
            with clock("eval"):
                if plan.is_due(plan.eval_every, step) and step < plan.num_steps:
                    evaluate(parts, step)
            row |= clock.row(made)
            parts.metrics.log(step, row)
            progress.update(step, row)
            if plan.is_due(plan.save_every, step) or stop.requested:
                save(parts, step, time.monotonic() - begun)
    return step


def build(
    config: Config, folder: Path, found: Checkpoint | None, stack: contextlib.ExitStack
) -> tuple[Parts, float]:
    """Every part of a run, and the seconds it had been running before `found` was saved."""
    torch.manual_seed(config.run.seed)  # a new LoRA adapter begins with random numbers
    problems, tasks, plan = plan_problems(config)
    for line in (*without_effect(config, plan), *sandbox_notes(tasks)):
        logger.info(line)
    scorer = stack.enter_context(Scorer(config))  # its processes start while the model loads
    policy = load_policy(config.model, None if found is None else found.folder)
    logger.info(describe_model(policy, config))
    updater = Updater(policy, config, plan, make_reference(config, policy, found))
    seconds = 0.0
    if found is not None:
        state = found.load_state()
        updater.load_state(state["updater"])
        seconds = state["seconds"]
    collector = make_collector(config, policy, scorer, stack)
    groups = (Ahead if config.rollout.async_rollouts else Groups)(collector, tasks, config, plan)
    stack.callback(groups.close)
    if found is not None:
        groups.load_state(state["groups"])
    metrics = open_metrics(config, folder, found, stack)
    parts = Parts(
        config=config,
        plan=plan,
        folder=folder,
        policy=policy,
        groups=groups,
        updater=updater,
        evaluator=Evaluator(config, problems, collector, folder) if problems else None,
        metrics=metrics,
    )
    return parts, seconds


def make_reference(config: Config, policy: Policy, found: Checkpoint | None) -> Reference | None:
    """Whom the KL compares with; a resumed run needs the first weights again, not its checkpoint's."""
    loss = config.loss
    if loss.beta == 0 or loss.kl_target == "rollout":
        return None
    moving = loss.kl_target == "moving"  # its weights are in the checkpoint
    again = found is not None and not moving and not policy.is_lora
    return Reference.of(policy, load_policy(config.model) if again else policy, moving=moving)


def describe(parts: Parts, step: int, made: Round) -> dict[str, float]:
    """The numbers of a step's rollouts; its completions go to the folder, and to the terminal where asked
    for.
    """
    run, plan, groups = parts.config.run, parts.plan, made.groups
    if plan.is_due(run.log_completions_steps, step) or step == plan.updates_per_batch:
        write_completions(parts.folder, step, groups)
    if run.verbose_variance_logging:
        show_variance(groups)
    row = rollout_metrics(groups)
    if run.log_reward_variance:
        row |= variance_metrics(groups)
    return {**row, **made.row}


def describe_model(policy: Policy, config: Config) -> str:
    total = sum(parameter.numel() for parameter in policy.model.parameters())
    trained = sum(parameter.numel() for parameter in policy.parameters)
    precision = str(policy.lm.dtype).removeprefix("torch.")
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
    save_checkpoint(
        parts.folder,
        step=step,
        model=parts.policy.model,
        tokenizer=parts.policy.tokenizer,
        state={"updater": parts.updater.state(), "groups": parts.groups.state(), "seconds": seconds},
        keep=parts.config.run.save_total_limit,
    )


def _finish(parts: Parts, seconds: float) -> dict[str, Any]:
    """The last evaluation, the final model, train_results.json and the report."""
    after = evaluate(parts, parts.plan.num_steps)
    if parts.config.run.save_strategy != "no":
        save(parts, parts.plan.num_steps, seconds)
    save_model(parts.policy.model, parts.policy.tokenizer, parts.folder / "final_model")
    return conclude(parts.folder, after, steps=parts.plan.num_steps, seconds=seconds)


def evaluate_only(loaded: Loaded) -> dict[str, Any]:
    """Measure `checkpoint_path` (or the model itself) on the fixed problems."""
    config = loaded.config
    folder = path_of(config)
    folder.mkdir(parents=True, exist_ok=True)
    setup_logging(folder)
    for note in loaded.notes:
        logger.info(note)
    problems = eval_problems(config)
    if not problems:
        raise UserError("There is nothing to evaluate: set eval_num_samples to how many problems you want.")
    weights = config.evaluation.checkpoint_path
    if weights is not None and not Path(weights).is_dir():
        raise UserError(
            f"checkpoint_path: there is no folder '{weights}': give a checkpoint-N or final_model folder."
        )
    with contextlib.ExitStack() as stack:
        scorer = stack.enter_context(Scorer(config))
        policy = load_policy(config.model, weights)
        logger.info(describe_model(policy, config))
        collector = make_collector(config, policy, scorer, stack)
        collector.engine.update_weights(0)
        name = Path(weights).name if weights else "model"
        evaluator = Evaluator(config, problems, collector, folder / "evaluations" / name)
        result = evaluator.run(0, greedy=config.evaluation.eval_greedy)
    show(result, num_examples=config.evaluation.eval_num_examples_to_print)
    return result.summary()


class Clock:
    """Where a step's time went."""

    def __init__(self) -> None:
        self.begun = time.monotonic()
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self.seconds[stage] = time.monotonic() - begun

    def row(self, made: Round) -> dict[str, float]:
        """Where the loop's seconds went (a batch that was sampled in the background costs it only the wait),
        and tokens a second.
        """
        num_tokens = sum(len(r.completion.token_ids) for group in made.groups for r in group.rollouts)
        waited = self.seconds["rollout"]
        score = min(made.scoring_s, waited)
        seconds = {**self.seconds, "rollout": waited - score, "score": score}
        return {
            **{f"time/{stage}": value for stage, value in seconds.items()},
            "time/step": time.monotonic() - self.begun,
            "tokens_per_s": num_tokens / (waited + self.seconds["update"]),
            "rollout_tokens_per_s": num_tokens / (made.seconds - made.scoring_s),
        }
