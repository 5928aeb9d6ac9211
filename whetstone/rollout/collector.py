"""Problems -> scored groups: encode prompts, sample completions, score each as it finishes.

Used by training and evaluation.
"""

import time
from collections.abc import Sequence
from typing import Protocol

from whetstone import seeds
from whetstone.config import Config
from whetstone.engines.base import Engine, Request, SamplingParams
from whetstone.errors import UserError
from whetstone.tasks.scoring.pool import Scorer
from whetstone.tasks.scoring.process import ScoringRequest
from whetstone.terminal.stages import advance, stage
from whetstone.types import Finish, Group, Problem, Rollout


class Codec(Protocol):
    """Messages to tokens and back (`model.chat.Chat`)."""

    def encode(self, problem: Problem) -> tuple[int, ...]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...


class RolloutCancelled(Exception):
    """Sampling was cancelled because the run ends."""


class GroupCollector(Protocol):
    """What evaluation needs of a collector."""

    def collect(
        self,
        problems: list[Problem],
        *,
        num_samples: int,
        sampling: SamplingParams,
        seed_parts: tuple[int | str, ...],
    ) -> list[Group]: ...


class CollectorProtocol(GroupCollector, Protocol):
    """The interface of `Collector` and `DistributedCollector`."""

    engine: Engine
    num_truncated_prompts: int  # the caller resets these two
    scoring_s: float
    is_collective: bool  # `collect` waits for all ranks

    @property
    def cancelled(self) -> bool: ...
    @cancelled.setter
    def cancelled(self, value: bool) -> None: ...
    @property
    def custom_metrics(self) -> dict[str, float]: ...


class Collector:
    """Turns problems into scored groups in this process."""

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
        self.is_collective = False
        self.max_prompt_length = max_prompt_length  # longer prompts are truncated on the left
        self.max_length = max_length  # of prompt plus completion, as the model allows
        self.num_truncated_prompts = 0  # since the caller last reset these two
        self.scoring_s = 0.0  # waiting for scores after the last sample
        self.cancelled = False  # set from another thread: stop at the next sample

    def collect(
        self,
        problems: list[Problem],
        *,
        num_samples: int,
        sampling: SamplingParams,
        seed_parts: tuple[int | str, ...],
    ) -> list[Group]:
        """`num_samples` scored completions per problem; a sample's seed is (seed_parts, problem, sample)."""
        prompts = [self._encode(problem, sampling.max_tokens) for problem in problems]
        requests = [
            Request(
                prompt_ids=prompt,
                seeds=tuple(seeds.seed(*seed_parts, problem.id, n) for n in range(num_samples)),
            )
            for problem, prompt in zip(problems, prompts, strict=True)
        ]
        outputs, texts = [], []
        with stage("sampling", total=len(problems) * num_samples):
            self.engine.wake()
            for output in self.engine.generate(requests, sampling):
                if self.cancelled:
                    raise RolloutCancelled
                text = self.codec.decode(output.completion.token_ids)
                truncated = output.completion.finish is Finish.LENGTH
                answer = ScoringRequest(
                    problem=problems[output.request],
                    text=text,
                    completion_ids=output.completion.token_ids,
                    truncated=truncated,
                )
                self.scorer.submit(answer)  # scoring overlaps with sampling
                outputs.append(output)
                texts.append(text)
                advance()
            self.engine.sleep()
        started = time.monotonic()
        with stage("scoring", total=len(outputs)):
            scores = self.scorer.gather()
        self.scoring_s += time.monotonic() - started
        rollouts = {
            (output.request, output.sample): Rollout(
                prompt_ids=prompts[output.request], completion=output.completion, text=text, score=score
            )
            for output, text, score in zip(outputs, texts, scores, strict=True)
        }
        return [
            Group(problem=problem, rollouts=tuple(rollouts[p, n] for n in range(num_samples)))
            for p, problem in enumerate(problems)
        ]

    @property
    def custom_metrics(self) -> dict[str, float]:
        """Metrics that the user's reward functions logged in the last `collect`."""
        return self.scorer.custom_metrics

    def _encode(self, problem: Problem, max_tokens: int) -> tuple[int, ...]:
        prompt = self.codec.encode(problem)
        if self.max_prompt_length is not None and len(prompt) > self.max_prompt_length:
            prompt = prompt[-self.max_prompt_length :]
            self.num_truncated_prompts += 1
        if self.max_length is not None and len(prompt) + max_tokens > self.max_length:
            raise UserError(
                f"The prompt of {problem.id} has {len(prompt)} tokens, which with {max_tokens} new ones "
                f"exceeds the {self.max_length} "
                "that the model allows: lower max_completion_length, make the task's problems or "
                "developer_prompt shorter (developer_prompt=null leaves it out), or set max_prompt_length."
            )
        return prompt


def sampling_params(config: Config, temperature: float) -> SamplingParams:
    """Sampling parameters of a configuration. Training and evaluation differ in temperature alone."""
    rollout = config.rollout
    return SamplingParams(
        max_tokens=rollout.max_completion_length,
        temperature=temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k or 0,
        min_p=rollout.min_p or 0.0,
    )
