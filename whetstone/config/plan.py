"""Batch arithmetic, done once: how many prompts, completions, updates, evaluations a run consists of.

A *batch* is one round of sampling; it serves `updates_per_batch` optimizer steps. As in TRL, `max_steps`,
`fixed_eval_steps` and `save_steps` count optimizer steps.
"""

import math
from dataclasses import dataclass

from whetstone.config.sections import Config, RolloutConfig
from whetstone.errors import UserError
from whetstone.terminal.text import counted, times

MAX_COMPLETIONS = 1_000_000  # of a batch: each is kept in memory until the batch is done


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will happen, in numbers."""

    prompts_per_batch: int
    num_generations: int
    minibatches: int  # parts of a batch that get an optimizer step each
    num_iterations: int
    num_batches: int
    num_steps: int  # optimizer steps
    eval_every: int  # optimizer steps; 0: only at the start and the end
    save_every: int  # optimizer steps; 0: never
    warmup_steps: int
    num_problems: int  # training problems before they come round again

    @property
    def updates_per_batch(self) -> int:
        return self.minibatches * self.num_iterations

    @property
    def completions_per_batch(self) -> int:
        return self.prompts_per_batch * self.num_generations

    def epoch(self, step: int) -> float:
        """Passes over the training problems by optimizer step `step`."""
        return step / self.updates_per_batch * self.prompts_per_batch / self.num_problems

    def is_due(self, every: int, step: int) -> bool:
        """Whether a multiple of `every` was reached by the batch that ended at optimizer step `step`."""
        return every > 0 and step // every > (step - self.updates_per_batch) // every

    def lines(self, config: Config, num_eval_problems: int | None = None) -> list[str]:
        """The plan in sentences. `num_eval_problems`: as many as there really are, once they are counted."""
        tokens = self.completions_per_batch * config.rollout.max_completion_length
        planned = config.evaluation.eval_num_samples
        evaluations = 1 + math.ceil(self.num_steps / (self.eval_every or self.num_steps)) if planned else 0
        repeats = self.epoch(self.num_steps)
        seen = "seen once" if repeats == 1 else f"seen {times(repeats)}"
        seen = f"{100 * repeats:.2g} % of them seen" if repeats < 1 else seen
        measured = planned if num_eval_problems is None else num_eval_problems
        size = config.update.micro_batch_tokens
        lines = [
            f"{counted(self.num_batches, 'batch', 'batches')} of "
            f"{counted(self.prompts_per_batch, 'prompt')} x {counted(self.num_generations, 'completion')} "
            f"= {counted(self.completions_per_batch, 'completion')}, at most {tokens:,} new tokens each "
            "batch",
            f"{counted(self.num_steps, 'optimizer step')}, {self.updates_per_batch} a batch "
            f"({counted(self.minibatches, 'part')} x {counted(self.num_iterations, 'iteration')}), "
            "micro-batches of " + ("as many tokens as fit" if size == "auto" else f"{size:,} tokens"),
            f"{counted(self.num_problems, 'training problem')}, {seen}; "
            + (
                f"{counted(evaluations, 'evaluation')} of {counted(measured, 'problem')} x "
                f"{config.evaluation.eval_samples_per_problem}"
                if evaluations
                else "no evaluation"
            ),
        ]
        names = config.tasks.reward_funcs
        weights = config.tasks.reward_weights or [1.0] * len(names)
        paid = (f"{name} ({weight})" for name, weight in zip(names, weights, strict=True))
        if config.loss.is_supervised:
            samples = (
                "correct samples of the policy" if config.rollout.rejection_sampling else "given solutions"
            )
            lines.append(f"supervised: the loss is the negative log-likelihood of {samples}")
        else:
            lines.append(f"rewards: {', '.join(paid)}")
        if config.rollout.async_rollouts:
            lines.append(
                "Each batch is sampled while the update learns from the one before, by weights one batch old "
                f"(async_rollouts; importance_correction: {config.loss.importance_correction})"
            )
        return lines


def make_plan(config: Config, *, num_problems: int, world_size: int = 1) -> Plan:
    """Work the arithmetic out, or say why it cannot be."""
    rollout, update = config.rollout, config.update
    if config.loss.is_supervised and not rollout.rejection_sampling:
        rollout = rollout.model_copy(update={"num_generations": 1})  # one solution for each problem
    elif rollout.num_generations == 1 and config.loss.advantage in ("group", "rloo"):
        raise UserError(
            "num_generations is 1, and a completion that is compared with itself alone has no advantage: set "
            "num_generations to 2 or more, or advantage to gae or reinforce_pp."
        )
    accumulation = rollout.gradient_accumulation_steps
    per_generation = rollout.steps_per_generation or accumulation
    unit = f"gradient_accumulation_steps ({accumulation})"
    minibatches = _quotient("steps_per_generation", per_generation, accumulation, unit)
    per_step = rollout.prompts_per_step or _prompts_from_batch_size(rollout, world_size)
    if rollout.generation_batch_size is not None:
        completions = per_step * rollout.num_generations
        unit = f"the {completions} completions of a step"
        minibatches = _quotient("generation_batch_size", rollout.generation_batch_size, completions, unit)
    prompts = per_step * minibatches
    completions = prompts * rollout.num_generations
    if completions > MAX_COMPLETIONS:
        raise UserError(
            f"A batch would have {completions:,} completions, more than {MAX_COMPLETIONS:,}: lower "
            "num_generations, prompts_per_step, gradient_accumulation_steps or steps_per_generation."
        )

    updates_per_batch = minibatches * update.num_iterations
    if update.max_steps > 0:
        num_steps = update.max_steps
    else:
        num_steps = math.ceil(update.num_train_epochs * num_problems / prompts) * updates_per_batch
    if num_steps % updates_per_batch:
        good = math.ceil(num_steps / updates_per_batch) * updates_per_batch
        raise UserError(
            f"max_steps ({update.max_steps}) does not divide into batches of {updates_per_batch} optimizer "
            f"steps ({minibatches} parts x {update.num_iterations} iterations): set max_steps to {good}."
        )
    per_epoch = math.ceil(num_problems / prompts) * updates_per_batch
    save_every = {"no": 0, "epoch": per_epoch, "steps": _every(config.run.save_steps, num_steps)}
    return Plan(
        prompts_per_batch=prompts,
        num_generations=rollout.num_generations,
        minibatches=minibatches,
        num_iterations=update.num_iterations,
        num_batches=num_steps // updates_per_batch,
        num_steps=num_steps,
        eval_every=_every(config.evaluation.fixed_eval_steps, num_steps),
        save_every=save_every[config.run.save_strategy],
        warmup_steps=update.warmup_steps or math.ceil(update.warmup_ratio * num_steps),
        num_problems=num_problems,
    )


def _every(steps: float, num_steps: int) -> int:
    """Optimizer steps between two events; a number below 1 is a fraction of all steps, as in TRL."""
    return math.ceil(steps * num_steps) if 0 < steps < 1 else math.ceil(steps)


def _quotient(key: str, value: int, unit: int, of_what: str) -> int:
    if value % unit:
        good = max(1, round(value / unit)) * unit
        raise UserError(f"{key} ({value}) is not a multiple of {of_what}: set it to {good}.")
    return value // unit


def _prompts_from_batch_size(rollout: RolloutConfig, world_size: int) -> int:
    completions = rollout.per_device_train_batch_size * rollout.gradient_accumulation_steps * world_size
    if completions % rollout.num_generations:
        factor = rollout.gradient_accumulation_steps * world_size
        unit = rollout.num_generations // math.gcd(rollout.num_generations, factor)
        good = max(unit, round(rollout.per_device_train_batch_size / unit) * unit)
        raise UserError(
            f"per_device_train_batch_size x gradient_accumulation_steps x devices = {completions} "
            f"completions a step is not a multiple of num_generations ({rollout.num_generations}): set "
            f"per_device_train_batch_size to {good}, or set prompts_per_step."
        )
    return completions // rollout.num_generations
