"""Problems -> scored groups: prompts are encoded, sampled by the engine, and scored as they finish.

The same road serves training and evaluation, which differ only in problems, sampling and seeds. No torch
here.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Any, Protocol

from whetstone import seeds
from whetstone.config import Config, Plan
from whetstone.engines.base import Engine, Request, Sampling
from whetstone.errors import UserError
from whetstone.rollout.curriculum import Curriculum
from whetstone.tasks.mixture import Mixture
from whetstone.tasks.scoring.pool import Answer, Scorer
from whetstone.terminal.stages import advance, stage
from whetstone.types import Finish, Group, Problem, Rollout


class Codec(Protocol):
    """Messages to tokens and back (`model.chat.Chat`)."""

    def encode(self, problem: Problem) -> tuple[int, ...]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...


class Abandoned(Exception):
    """Sampling was given up, since the run is ending."""


class Collector:
    """Everything that is needed to turn a problem into a scored group."""

    def __init__(
        self,
        engine: Engine,
        scorer: Scorer,
        codec: Codec,
        *,
        max_prompt_length: int | None,
        max_length: int | None,
    ):
        self.engine = engine
        self.scorer = scorer
        self.codec = codec
        self.waits_for_others = False
        self.max_prompt_length = max_prompt_length  # longer prompts lose their beginning
        self.max_length = max_length  # what the model allows, prompt and completion together
        self.prompts_cut = 0  # since these two were last set to 0
        self.scoring_s = 0.0  # spent waiting for scores after the last sample was done
        self.abandoned = False  # set from another thread: stop at the next sample

    def collect(
        self,
        problems: list[Problem],
        *,
        num_samples: int,
        sampling: Sampling,
        seed_parts: tuple[int | str, ...],
    ) -> list[Group]:
        """`num_samples` scored completions of each problem; a sample's seed is (seed_parts, problem,
        sample).
        """
        prompts = [self._encode(problem, sampling.max_tokens) for problem in problems]
        requests = [
            Request(
                prompt_ids=prompt,
                seeds=tuple(seeds.seed(*seed_parts, problem.id, n) for n in range(num_samples)),
            )
            for problem, prompt in zip(problems, prompts, strict=True)
        ]
        sampled, texts = [], []
        with stage("sampling", total=len(problems) * num_samples):
            self.engine.wake()
            for one in self.engine.generate(requests, sampling):
                if self.abandoned:
                    raise Abandoned
                text = self.codec.decode(one.completion.token_ids)
                truncated = one.completion.finish is Finish.LENGTH
                answer = Answer(
                    problem=problems[one.request],
                    text=text,
                    completion_ids=one.completion.token_ids,
                    truncated=truncated,
                )
                self.scorer.submit(answer)  # scoring goes on while others are still being sampled
                sampled.append(one)
                texts.append(text)
                advance()
            self.engine.sleep()
        begun = time.monotonic()
        with stage("scoring", total=len(sampled)):
            scores = self.scorer.gather()
        self.scoring_s += time.monotonic() - begun
        rollouts = {
            (one.request, one.sample): Rollout(
                prompt_ids=prompts[one.request], completion=one.completion, text=text, score=score
            )
            for one, text, score in zip(sampled, texts, scores, strict=True)
        }
        return [
            Group(problem=problem, rollouts=tuple(rollouts[p, n] for n in range(num_samples)))
            for p, problem in enumerate(problems)
        ]

    @property
    def custom_metrics(self) -> dict[str, float]:
        """What the user's reward functions logged in the last `collect`."""
        return self.scorer.custom_metrics

    def _encode(self, problem: Problem, max_tokens: int) -> tuple[int, ...]:
        prompt = self.codec.encode(problem)
        if self.max_prompt_length is not None and len(prompt) > self.max_prompt_length:
            prompt = prompt[-self.max_prompt_length :]
            self.prompts_cut += 1
        if self.max_length is not None and len(prompt) + max_tokens > self.max_length:
            raise UserError(
                f"The prompt of {problem.id} has {len(prompt)} tokens, which with {max_tokens} new ones "
                f"exceeds the {self.max_length} "
                "that the model allows: lower max_completion_length, make the task's problems or "
                "developer_prompt shorter (developer_prompt=null leaves it out), or set max_prompt_length."
            )
        return prompt


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round of sampling: what a batch learns from, and how it was had."""

    groups: list[Group]
    indices: list[int]  # of their problems in the mixture
    levels: dict[str, int]  # of the tasks that have a curriculum
    seconds: float  # that sampling and scoring took
    scoring_s: float  # of them, waiting for scores after the last sample
    row: dict[str, float]  # metrics of the sampling itself
    sync_s: float = 0.0  # that the policy's weights took to reach the engine, beside them


class Collects(Protocol):
    """What `Collector` offers: one of this process, or those of all ranks as one (`sharing`)."""

    engine: Engine
    prompts_cut: int
    scoring_s: float
    waits_for_others: bool  # `collect` returns only once all ranks have come to its end

    @property
    def abandoned(self) -> bool: ...
    @abandoned.setter
    def abandoned(self, value: bool) -> None: ...
    @property
    def custom_metrics(self) -> dict[str, float]: ...

    def collect(
        self,
        problems: list[Problem],
        *,
        num_samples: int,
        sampling: Sampling,
        seed_parts: tuple[int | str, ...],
    ) -> list[Group]: ...


class Groups:
    """The scored groups of each batch of a run, a function of (seeds, step, weights) alone."""

    def __init__(self, collector: Collects, tasks: Mixture, config: Config, plan: Plan):
        self._collector = collector
        self._tasks = tasks
        self._config = config
        self._plan = plan
        self._curriculum = Curriculum(tasks.ladders)
        self._pushed: int | None = None  # the version of the weights that the engine has

    def of(self, step: int) -> Round:
        """The round of the batch that begins at optimiser step `step`, which the policy has now reached."""
        sync_s = self.settle(step)
        return replace(self._dated(self.sample(step), step), sync_s=sync_s)

    def settle(self, step: int) -> float:
        """Return when the engine is idle and samples from the policy's weights of now, version `step`; the
        seconds that handing them over took.
        """
        begun = time.monotonic()
        if self._pushed != step:
            with stage("weights to the engine"):
                self._collector.engine.update_weights(step)
            self._pushed = step
        return time.monotonic() - begun

    def state(self) -> dict[str, Any]:
        """What a resumed run needs beside the step: plain data."""
        return {"curriculum": self._curriculum.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._curriculum.load_state(state["curriculum"])

    def close(self) -> None: ...

    def sample(self, step: int) -> Round:
        """Sample and score the batch of optimiser step `step` with the weights that the engine has."""
        begun = time.monotonic()
        collector = self._collector
        collector.prompts_cut, collector.scoring_s = 0, 0.0
        size = self._plan.prompts_per_batch
        first = step // self._plan.updates_per_batch * size
        indices = list(range(first, first + size))
        levels, row = dict(self._curriculum.levels), self._curriculum.row()
        groups = self._collect(step, 0, indices)
        if self._config.rollout.dynamic_sampling:
            row["dynamic_sampling/resample_ratio"] = self._replace_flat(step, groups, indices) / size
        row |= {"prompts_truncated": float(collector.prompts_cut), **collector.custom_metrics}
        self._curriculum.observe(groups)
        return Round(
            groups=groups,
            indices=indices,
            levels=levels,
            seconds=time.monotonic() - begun,
            scoring_s=collector.scoring_s,
            row=row,
        )

    def _replace_flat(self, step: int, groups: list[Group], indices: list[int]) -> int:
        """Put fresh groups in the place of those that teach nothing; returns how many were sampled."""
        number, replaced = step // self._plan.updates_per_batch, 0
        rounds = self._config.rollout.dynamic_sampling_max_rounds
        for attempt in range(rounds):
            flat = [place for place, group in enumerate(groups) if not has_reward_variance(group)]
            if not flat:
                break
            # Fresh problems come from beyond those that the run's own batches use.
            beyond = self._plan.num_batches + number * rounds + attempt
            fresh = [beyond * len(groups) + place for place in flat]
            for place, index, group in zip(flat, fresh, self._collect(step, attempt + 1, fresh), strict=True):
                groups[place], indices[place] = group, index
            replaced += len(flat)
        return replaced

    def _dated(self, made: Round, step: int) -> Round:
        """With its `staleness`: batches of updates that the policy is ahead of the one that sampled."""
        versions = [r.completion.policy_version for group in made.groups for r in group.rollouts]
        ages = [(step - version) / self._plan.updates_per_batch for version in versions]
        allowed = self._config.rollout.async_rollouts
        if not 0 <= min(ages) <= max(ages) <= allowed:
            raise UserError(
                f"The engine sampled with the weights of step {min(versions)} for the batch of step {step}, "
                f"but at most {allowed} batch behind is allowed (async_rollouts): its weights are not being "
                "updated; restart it, or set rollout_engine=native."
            )
        return replace(made, row={**made.row, "staleness": fmean(ages)})

    def _collect(self, step: int, attempt: int, indices: list[int]) -> list[Group]:
        return self._collector.collect(
            [self._tasks.problem(index, self._curriculum.levels) for index in indices],
            num_samples=self._plan.num_generations,
            sampling=sampling_at(self._config, self._config.rollout.temperature),
            seed_parts=(self._config.run.seed, "rollout", step, *([attempt] if attempt else [])),
        )


def has_reward_variance(group: Group) -> bool:
    return len({rollout.score.reward for rollout in group.rollouts}) > 1


def sampling_at(config: Config, temperature: float) -> Sampling:
    """The sampling of a configuration at some temperature: training and evaluation differ in that alone."""
    rollout = config.rollout
    return Sampling(
        max_tokens=rollout.max_completion_length,
        temperature=temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k or 0,
        min_p=rollout.min_p or 0.0,
    )


def rollout_metrics(groups: Iterable[Group]) -> dict[str, float]:
    """What a step's rollouts looked like, in the numbers that every step logs."""
    groups = list(groups)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.score.reward for rollout in rollouts]
    parts = sorted({part for rollout in rollouts for part in rollout.score.parts})
    row = {
        "reward": fmean(rewards),
        "reward_std": pstdev(rewards),
        **_accuracy("accuracy", rollouts),
        **_length_metrics(rollouts),
        "scoring_failures": float(sum(rollout.score.failure is not None for rollout in rollouts)),
    }
    for part in parts:
        values = [rollout.score.parts[part] for rollout in rollouts if part in rollout.score.parts]
        row |= {f"rewards/{part}/mean": fmean(values), f"rewards/{part}/std": pstdev(values)}
    outcomes = [rollout.score.outcome for rollout in rollouts if rollout.score.outcome is not None]
    for outcome in ("passed", "wrong", "crash", "timeout", "compile_error", "no_program") if outcomes else ():
        row[f"programs/{outcome}_ratio"] = outcomes.count(outcome) / len(outcomes)
    for task in sorted({group.problem.task for group in groups}):
        of_task = [r for group in groups if group.problem.task == task for r in group.rollouts]
        row |= _accuracy(f"accuracy/{task}", of_task)
    return row


def _length_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """TRL's metrics of lengths in tokens; `terminated`: of completions that were not truncated, 0 if none."""
    lengths = [len(rollout.completion.token_ids) for rollout in rollouts]
    is_truncated = [rollout.completion.finish is Finish.LENGTH for rollout in rollouts]
    terminated = [n for n, truncated in zip(lengths, is_truncated, strict=True) if not truncated] or [0]
    return {
        "completions/mean_length": fmean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": fmean(is_truncated),
        "completions/mean_terminated_length": fmean(terminated),
        "completions/min_terminated_length": float(min(terminated)),
        "completions/max_terminated_length": float(max(terminated)),
    }


def _accuracy(name: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The share of right answers; nothing where no answer is known that they could be compared with."""
    scored = [rollout.score for rollout in rollouts if rollout.score.failure is None]
    if scored and not any("correct" in score.parts for score in scored):
        return {}
    return {name: fmean(r.score.parts["correct"] for r in rollouts if "correct" in r.score.parts)}


def variance_metrics(groups: Iterable[Group]) -> dict[str, float]:
    """Fractions of prompts whose rewards are all equal (they teach nothing), and whose answers are."""
    groups = list(groups)
    return {
        "frac_reward_zero_std": fmean(not has_reward_variance(group) for group in groups),
        "frac_answers_identical": fmean(
            len({r.score.answer for r in group.rollouts}) == 1 for group in groups
        ),
    }
