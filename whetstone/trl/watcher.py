"""What our loop does beside sampling and updating, at TRL's events: evaluation, rows of metrics, checkpoints,
a stop that was asked for.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers import TrainerCallback

from whetstone.config import Config, Plan
from whetstone.evaluation.evaluator import EvalResult, Evaluator, show
from whetstone.model.attention import NAME
from whetstone.model.card import finish_adapter
from whetstone.model.manifest import write_manifest
from whetstone.model.policy import Policy
from whetstone.rollout.collector import rollout_metrics, variance_metrics
from whetstone.rollout.learning_signal import LearningSignal
from whetstone.run.checkpoint import Checkpoint, share_files
from whetstone.run.completions import show_variance, write_completions
from whetstone.run.metrics import MetricsLog
from whetstone.run.progress import Progress
from whetstone.run.signals import StopRequest
from whetstone.run.timing import peak_memory_gb, reset_peak_memory
from whetstone.trl.problems import Rewards
from whetstone.types import Group


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run under TRL works with."""

    config: Config
    plan: Plan
    folder: Path
    policy: Policy
    attention: str  # that TRL samples and trains with
    rewards: Rewards
    evaluator: Evaluator | None
    metrics: MetricsLog
    found: Checkpoint | None


def evaluate(parts: Parts, step: int) -> EvalResult | None:
    """The fixed evaluation, on our engine; TRL finds the model as it left it."""
    if parts.evaluator is None:
        return None
    model, was_training = parts.policy.model, parts.policy.model.training
    parts.policy.set_attention(NAME)
    ends = step in (0, parts.plan.num_steps)
    result = parts.evaluator.run(step, greedy=ends and parts.config.evaluation.eval_greedy)
    parts.policy.set_attention(parts.attention)
    model.train(was_training)
    parts.metrics.log_eval(step, result.row())
    show(result, num_examples=parts.config.evaluation.eval_num_examples_to_print)
    return result


# TRL's name of a metric -> ours. All about the rollouts is counted by us, from the groups.
TAKEN = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "kl": "kl",
    "entropy": "entropy",
    "entropy_coef": "entropy_coef",
    "clip_ratio/region_mean": "clip_ratio/region_mean",
    "cispo_clip_ratio": "clip_ratio/region_mean",
}


class TrlCallback(TrainerCallback):
    """Our loop's other half, at TRL's events: evaluation, rows, checkpoints, a stop that was asked for."""

    def __init__(self, parts: Parts, stop: StopRequest, begun: float):
        self.parts, self.stop, self.run_begun = parts, stop, begun
        run, found = parts.config.run, parts.found
        self.progress = Progress(
            parts.plan.num_steps,
            start_step=0 if found is None else found.step,
            logging_steps=run.logging_steps,
            logging_first_step=run.logging_first_step,
        )
        self.signal = LearningSignal(parts.config)
        self.logs: list[dict[str, float]] = []  # of the optimiser steps of this batch
        self.begun = self.updated = 0.0

    def _ends_batch(self, step: int) -> bool:
        return step % self.parts.plan.updates_per_batch == 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._ends_batch(state.global_step):
            self.begun, self.logs = time.monotonic(), []
            reset_peak_memory(self.parts.policy.device)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step, plan = state.global_step, self.parts.plan
        if not self._ends_batch(step):
            return
        self.updated = time.monotonic()
        at_end = step == plan.num_steps and self.parts.config.run.save_strategy != "no"
        if plan.is_due(plan.save_every, step) or at_end or (self.stop.requested and step < plan.num_steps):
            control.should_save = True
        if self.stop.requested:
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" not in logs:  # the sum-up at the end
            return
        self.logs.append(
            {TAKEN[key]: value for key, value in logs.items() if key in TAKEN and value is not None}
        )
        if self._ends_batch(state.global_step):
            step, plan = state.global_step, self.parts.plan
            row = self._row(step)
            self.progress.update(step, row)
            if plan.is_due(plan.eval_every, step) and step < plan.num_steps:
                evaluate(self.parts, step)
            self.parts.metrics.log(step, row | self._times(self.parts.rewards.groups))

    def _row(self, step: int) -> dict[str, float]:
        """Means over the optimiser steps of the batch, and what its rollouts looked like."""
        run, plan, rewards = self.parts.config.run, self.parts.plan, self.parts.rewards
        groups = rewards.groups
        if plan.is_due(run.log_completions_steps, step) or step == plan.updates_per_batch:
            write_completions(self.parts.folder, step, groups)
        if run.verbose_variance_logging:
            show_variance(groups)
        self.signal.observe(groups)
        keys = dict.fromkeys(key for entry in self.logs for key in entry)
        row = {key: fmean(entry[key] for entry in self.logs if key in entry) for key in keys}
        row |= rollout_metrics(groups)
        if run.log_reward_variance:
            row |= variance_metrics(groups)
        return {**row, **rewards.scorer.custom_metrics, **self._times(groups)}

    def _times(self, groups: list[Group]) -> dict[str, float]:
        rewards, tokens = (
            self.parts.rewards,
            sum(len(r.completion.token_ids) for g in groups for r in g.rollouts),
        )
        now, rollout_s = time.monotonic(), rewards.begun - self.begun
        return {
            "time/rollout": rollout_s,
            "time/reward_wait": rewards.ended - rewards.begun,
            "time/weight_sync": 0.0,  # it samples from the weights that it trains
            "time/update": self.updated - rewards.ended,
            "time/eval": now - self.updated,
            "step_time": now - self.begun,
            "tokens_per_s": tokens / (self.updated - self.begun),
            "rollout_tokens_per_s": tokens / rollout_s,
            "peak_memory_gb": peak_memory_gb(self.parts.policy.device),
        }

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Mark TRL's checkpoint as whole, as ours are, so that a run is found again in the same way."""
        folder = self.parts.folder / f"checkpoint-{state.global_step}"
        self.parts.policy.tokenizer.save_pretrained(folder)  # TRL's copy may carry the assistant's prefix
        finish_adapter(folder)
        share_files(folder)
        write_manifest(folder, step=state.global_step, seconds=time.monotonic() - self.run_begun)
