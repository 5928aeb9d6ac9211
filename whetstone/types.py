"""One type per stage of the data flow: problem -> completion -> score -> rollout -> group.

Frozen and complete when created: a value that is known later belongs to the next type. No torch here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple


class Finish(StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # the model sampled a stop token
    LENGTH = "length"  # max_completion_length was reached: truncated


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a task asks, a pure function of (seed, split, index)."""

    id: str  # "countdown/train/000123"
    task: str
    messages: tuple[Mapping[str, str], ...]  # {"role": ..., "content": ...}
    answer: Any  # what this task's own `score` needs; plain data that can be pickled

    @property
    def question(self) -> str:
        """The last message: what distinguishes this problem from the others of its task."""
        return self.messages[-1]["content"]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What an engine sampled for one prompt."""

    token_ids: tuple[int, ...]  # the stop token included
    logprobs: tuple[float, ...]  # of the sampling policy (temperature and filters applied), one per token
    finish: Finish
    policy_version: int  # number of weight updates the sampling policy had seen


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """A task's judgement of one completion: what `Task.score` returns."""

    correct: bool | None  # None: the task does not judge (rows without an answer)
    reward: float | None  # what the reward function `accuracy` pays
    answer: str | None = None  # the extracted answer, None where there was none
    outcome: str | None = None  # of a program: passed, wrong, compile_error, timeout, crash, no_program
    tests: tuple[str, ...] = ()  # the same for each of its tests

    @property
    def parts(self) -> dict[str, float]:
        """`correct` and `accuracy`, as far as there are."""
        parts = {} if self.correct is None else {"correct": float(self.correct)}
        return parts if self.reward is None else {**parts, "accuracy": self.reward}


@dataclass(frozen=True, kw_only=True)
class Score:
    """What a completion is worth. Evaluation reads `parts["correct"]`, never the shaped reward."""

    reward: float  # what training maximizes
    parts: Mapping[str, float]  # "correct", "accuracy", "format", ... each unweighted
    answer: str | None  # what was taken for the answer, None where there was none
    failure: str | None = None  # why scoring failed: "timeout", "crash", "error: ..."
    outcome: str | None = None  # of a program: passed, wrong, compile_error, timeout, crash, no_program
    tests: tuple[str, ...] = ()  # the same for each of its tests
    extra: Mapping[str, Any] = field(default_factory=dict)  # what reward functions gave to `log_extra`


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One scored completion. It exists only once it is scored."""

    prompt_ids: tuple[int, ...]
    completion: Completion
    text: str
    score: Score


@dataclass(frozen=True, kw_only=True)
class Group:
    """All rollouts of one problem: baselines are taken inside it."""

    problem: Problem
    rollouts: tuple[Rollout, ...]

    @property
    def has_reward_variance(self) -> bool:
        return len({rollout.score.reward for rollout in self.rollouts}) > 1


class Segment(NamedTuple):
    """Tokens of a packed batch, which see each other causally and all of an earlier run: a shared prompt."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0
