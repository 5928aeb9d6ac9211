"""One type per stage of the corridor: problem -> completion -> score -> rollout -> group.

Frozen and complete when made: a value that is known later belongs to the next type. No torch here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple


class Finish(StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # the model said a stop token
    LENGTH = "length"  # max_completion_length was reached: truncated
    ABORT = "abort"  # the engine gave up on it


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
class Score:
    """What a completion is worth. Evaluation reads `parts["correct"]`, never the shaped reward."""

    reward: float  # what training maximises
    parts: Mapping[str, float]  # "correct", "accuracy", "format", ... each unweighted
    answer: str | None  # what was taken for the answer, None where there was none
    failure: str | None = (
        None  # why scoring failed ("timeout", "crash", "error: ..."), None when it went well
    )
    outcome: str | None = (
        None  # how a program fared: passed, wrong, compile_error, timeout, crash, no_program
    )
    tests: tuple[str, ...] = ()  # the same for each of its tests


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


class Segment(NamedTuple):
    """A run of tokens in a packed batch, which sees itself causally and, in full, an earlier run: the prompt
    it shares with other completions.
    """

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0
