"""A TRL callback that does what our loop does: evaluation, metrics, checkpoints, a requested stop."""

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers import TrainerCallback

from benchmarks.trl.problems import Rewards
from whetstone.config import Config, Plan
from whetstone.evaluation.display import print_result
from whetstone.evaluation.evaluator import Evaluator
from whetstone.model.card import finish_adapter
from whetstone.model.manifest import write_manifest
from whetstone.model.policy import Policy
from whetstone.rollout.learning_signal import LearningSignal
from whetstone.run.atomic_folder import share_files
from whetstone.run.checkpoint import Checkpoint
from whetstone.run.completions import log_rollouts
from whetstone.run.metrics import MetricsLog, with_own
from whetstone.run.progress import Progress
from whetstone.run.resources import ResourceMonitor
from whetstone.run.signals import StopRequest
from whetstone.run.timing import peak_memory_gb, reset_peak_memory
from whetstone.types import Group


@dataclass(frozen=True, kw_only=True)
class TrlRun:
    """The components of a run under TRL."""

    config: Config
    plan: Plan
    folder: Path
    policy: Policy
    attention: str  # that TRL samples and trains with
    rewards: Rewards
    evaluator: Evaluator | None
    metrics: MetricsLog
    resources: ResourceMonitor
    checkpoint: Checkpoint | None


def evaluate(run: TrlRun, step: int) -> None:
    """The fixed evaluation, on our engine; TRL finds the model as it left it."""
    if run.evaluator is None:
        return
    model, was_training = run.policy.model, run.policy.model.training
    run.policy.restore_attention()
    ends = step in (0, run.plan.num_steps)
    result = run.evaluator.run(step, greedy=ends and run.config.evaluation.eval_greedy)
    run.policy.set_attention(run.attention)
    model.train(was_training)
    run.metrics.log_eval(step, result.metrics())
    print_result(result, num_examples=run.config.evaluation.eval_num_examples_to_print)


# TRL's metric -> ours. Metrics of the rollouts are computed from the groups.
_CLIP = ("clip_ratio/region_mean", "clip_ratio/low_mean", "clip_ratio/high_mean")
_SAME = ("loss", "grad_norm", "learning_rate", "kl", "entropy", "entropy_coef", "num_tokens", *_CLIP)
METRIC_NAMES = {name: name for name in _SAME} | {"cispo_clip_ratio": "clip_ratio/region_mean"}


class TrlCallback(TrainerCallback):
    def __init__(self, run: TrlRun, stop: StopRequest, started_at: float):
        self.run, self.stop, self.started_at = run, stop, started_at
        settings, checkpoint = run.config.run, run.checkpoint
        self.progress = Progress(
            run.plan.num_steps,
            start_step=0 if checkpoint is None else checkpoint.step,
            logging_steps=settings.logging_steps,
        )
        self.signal = LearningSignal(run.config)
        self.logs: list[dict[str, float]] = []  # of the optimizer steps of this batch
        self.step_started = self.updated = 0.0

    def _ends_batch(self, step: int) -> bool:
        return step % self.run.plan.updates_per_batch == 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._ends_batch(state.global_step):
            self.step_started, self.logs = time.monotonic(), []
            reset_peak_memory(self.run.policy.device)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step, plan = state.global_step, self.run.plan
        if not self._ends_batch(step):
            return
        self.updated = time.monotonic()
        at_end = step == plan.num_steps and self.run.config.run.save_strategy != "no"
        if plan.is_due(plan.save_every, step) or at_end or (self.stop.requested and step < plan.num_steps):
            control.should_save = True
        if self.stop.requested:
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" not in logs:  # the sum-up at the end
            return
        known = {key: value for key, value in logs.items() if key in METRIC_NAMES and value is not None}
        self.logs.append({METRIC_NAMES[key]: value for key, value in known.items()})
        if self._ends_batch(state.global_step):
            step, plan = state.global_step, self.run.plan
            row = self._row(step)
            self.progress.update(step, row)
            if plan.is_due(plan.eval_every, step) and step < plan.num_steps:
                evaluate(self.run, step)
            row |= self._times(self.run.rewards.groups) | self.run.resources.metrics(step)
            self.run.metrics.log(step, row)

    def _row(self, step: int) -> dict[str, float]:
        """Means over the optimizer steps of the batch, and what its rollouts looked like."""
        run, groups = self.run, self.run.rewards.groups
        keys = dict.fromkeys(key for entry in self.logs for key in entry)
        row = {key: fmean(entry[key] for entry in self.logs if key in entry) for key in keys}
        row |= log_rollouts(run.folder, step, groups, run.config, run.plan, self.signal)
        own = {name: fmean(values) for name, values in run.rewards.scorer.custom_metrics.items() if values}
        return with_own({**row, **self._times(groups)}, own)

    def _times(self, groups: list[Group]) -> dict[str, float]:
        tokens = sum(len(r.completion.token_ids) for g in groups for r in g.rollouts)
        rewards = self.run.rewards
        now, rollout_s = time.monotonic(), rewards.started_at - self.step_started
        return {
            "time/rollout": rollout_s,
            "time/reward_wait": rewards.ended_at - rewards.started_at,
            "time/weight_sync": 0.0,  # it samples from the weights that it trains
            "time/update": self.updated - rewards.ended_at,
            "time/eval": now - self.updated,
            "step_time": now - self.step_started,
            "tokens_per_s": tokens / (self.updated - self.step_started),
            "rollout_tokens_per_s": tokens / rollout_s,
            "peak_memory_gb": peak_memory_gb(self.run.policy.device),
        }

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the manifest of our checkpoints into TRL's, so that resuming finds it."""
        folder = self.run.folder / f"checkpoint-{state.global_step}"
        self.run.policy.tokenizer.save_pretrained(folder)  # TRL's copy may carry the assistant's prefix
        finish_adapter(folder)
        share_files(folder)
        write_manifest(folder, step=state.global_step, seconds=time.monotonic() - self.started_at)
