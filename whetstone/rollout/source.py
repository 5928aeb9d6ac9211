"""Which groups of rollouts each step trains on: problems of the step, curriculum, dynamic sampling."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from whetstone.config import Config, Plan
from whetstone.errors import UserError
from whetstone.rollout.collector import Collector, CollectReport, sampling_params
from whetstone.rollout.curriculum import Curriculum
from whetstone.rollout.learning_signal import has_signal
from whetstone.tasks.mixture import Mixture
from whetstone.terminal.stages import stage
from whetstone.types import Group, Problem, count_occurrences


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """The scored groups of one batch, and how they were sampled."""

    groups: list[Group]
    indices: list[int]  # of their problems in the mixture
    levels: dict[str, int]  # of the tasks that have a curriculum
    seconds: float  # sampling and scoring
    scoring_s: float  # of these, waiting for scores after the last sample
    metrics: dict[str, float]  # of the sampling itself
    own_metrics: dict[str, float] = field(default_factory=dict)  # from `log_metric`, of all that was sampled
    sync_s: float = 0.0  # weight transfer to the engine before sampling; not part of `seconds`


class RolloutSource:
    """The rollouts of each batch: a pure function of seeds, step and weights."""

    def __init__(self, collector: Collector, tasks: Mixture, config: Config, plan: Plan):
        self._collector = collector
        self._tasks = tasks
        self._config = config
        self._plan = plan
        self._curriculum = Curriculum(tasks.curricula)
        self._first: list[Group] = []  # of the batch, before any was replaced or left out
        self._engine_version: int | None = None  # of the weights that the engine has
        self._sync_s = 0.0  # of the last `sync_weights`
        self._num_tokens = 0  # prompts and completions of all batches returned

    def sync_weights(self, step: int) -> None:
        """Give the engine the policy's weights, version `step`. The engine is idle when this returns."""
        started = time.monotonic()
        if self._engine_version != step:
            with stage("weights to the engine"):
                self._collector.engine.update_weights(step)
            self._engine_version = step
        self._sync_s = time.monotonic() - started

    def next_batch(self, step: int) -> RolloutBatch:
        """The batch of optimizer step `step`. Call `sync_weights(step)` first."""
        return self._observe(self.sample(step), step)

    def state(self) -> dict[str, Any]:
        """Plain data that a resumed run needs besides the step."""
        return {"curriculum": self._curriculum.state(), "num_tokens": self._num_tokens}

    def load_state(self, state: dict[str, Any]) -> None:
        self._curriculum.load_state(state["curriculum"])
        self._num_tokens = state["num_tokens"]

    def close(self) -> None: ...

    def sample(self, step: int) -> RolloutBatch:
        """Sample and score the batch of optimizer step `step` with the engine's current weights."""
        started = time.monotonic()
        collector = self._collector
        collector.report = CollectReport()
        size = self._plan.prompts_per_batch
        first = step // self._plan.updates_per_batch * size
        indices = list(range(first, first + size))
        levels, metrics = dict(self._curriculum.levels), self._curriculum.metrics()
        groups = self._collect(step, 0, indices)
        if self._config.rollout.dynamic_sampling:
            num_resampled = self._resample_zero_variance(step, groups, indices)
            metrics["dynamic_sampling/resample_ratio"] = num_resampled / size
        report = collector.report
        metrics["prompts_truncated"] = float(report.num_truncated_prompts)
        if any(rollout.episode is not None for group in groups for rollout in group.rollouts):
            metrics["episodes/idle_s"] = report.idle_s
        self._curriculum.observe(self._first)
        return RolloutBatch(
            groups=groups,
            indices=indices,
            levels=levels,
            seconds=time.monotonic() - started,
            scoring_s=report.scoring_s,
            metrics=metrics,
            own_metrics={name: fmean(values) for name, values in report.custom_metrics.items() if values},
        )

    def probe(self, first: int, number: int) -> list[Group]:
        """Groups of training problems from `first` on, with seeds of their own. Leaves nothing behind."""
        with self._collector.scorer.probing():
            return self._collector.collect(
                self._problems(range(first, first + number)),
                num_samples=self._plan.num_generations,
                sampling=sampling_params(self._config, self._config.rollout.temperature),
                seed_parts=(self._config.run.seed, "preflight"),
            )

    def _resample_zero_variance(self, step: int, groups: list[Group], indices: list[int]) -> int:
        """Dynamic sampling (DAPO): replace groups that would teach nothing; returns how many."""
        batch_number, num_resampled = step // self._plan.updates_per_batch, 0
        rounds = self._config.rollout.dynamic_sampling_max_rounds
        for attempt in range(rounds):
            slots = [slot for slot, group in enumerate(groups) if not has_signal(group, self._config)]
            if not slots:
                break
            # Replacements come from beyond the problems of the run's own batches.
            beyond = self._plan.num_batches + batch_number * rounds + attempt
            fresh = [beyond * len(groups) + slot for slot in slots]
            for slot, index, group in zip(slots, fresh, self._collect(step, attempt + 1, fresh), strict=True):
                groups[slot], indices[slot] = group, index
            num_resampled += len(slots)
        return num_resampled

    def _observe(self, batch: RolloutBatch, step: int) -> RolloutBatch:
        """Add the metrics `num_tokens` and `staleness` (the age of the sampling policy in batches)."""
        rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
        self._num_tokens += sum(rollout.num_tokens for rollout in rollouts)
        versions = [rollout.completion.policy_version for rollout in rollouts]
        ages = [(step - version) / self._plan.updates_per_batch for version in versions]
        allowed = self._config.rollout.async_rollouts
        if not 0 <= min(ages) <= max(ages) <= allowed:
            raise UserError(
                f"The engine sampled with the weights of step {min(versions)} for the batch of step {step}, "
                f"but at most {allowed} batch behind is allowed (async_rollouts): its weights are not being "
                "updated; restart it, or set rollout_engine=native."
            )
        metrics = {**batch.metrics, "num_tokens": float(self._num_tokens), "staleness": fmean(ages)}
        return replace(batch, metrics=metrics, sync_s=self._sync_s)

    def _collect(self, step: int, attempt: int, indices: list[int]) -> list[Group]:
        groups = self._collector.collect(
            self._problems(indices),
            num_samples=self._plan.num_generations,
            sampling=sampling_params(self._config, self._config.rollout.temperature),
            seed_parts=(self._config.run.seed, "rollout", step, *([attempt] if attempt else [])),
        )
        if attempt == 0:
            self._first = list(groups)
        return groups

    def _problems(self, indices: Iterable[int]) -> list[Problem]:
        return count_occurrences(self._tasks.problem(index, self._curriculum.levels) for index in indices)
