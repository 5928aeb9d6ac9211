"""One type per stage of the data flow: problem -> completion -> turn -> score -> rollout -> group.

Frozen and complete when created: a value that is known later belongs to the next type. No torch here.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

TopLogprobs = tuple[tuple[int, float], ...]  # (token, logprob), the likeliest first
Message = Mapping[str, Any]  # {"role": ..., "content": ...}, tool calls where there are some


def normal_form(text: str) -> str:
    """Without case and superfluous white space: questions that are equal so are the same."""
    return " ".join(text.split()).casefold()


def question_text(messages: Iterable[Message]) -> str:
    """What distinguishes a question from others: the conversation without its system message."""
    return "\n".join(turn["content"] for turn in messages if turn["role"] not in ("system", "developer"))


class Finish(StrEnum):
    """Why a completion ended; the last four: why an episode of several turns did."""

    STOP = "stop"  # the model sampled a stop token; of an episode: the environment ended it
    LENGTH = "length"  # max_completion_length was reached: truncated
    MAX_TURNS = "max_turns"
    CONTEXT_OVERFLOW = "context_overflow"  # the model has no room for another turn
    TOOL_ERROR = "tool_error"  # the environment failed
    TIMEOUT = "timeout"  # the environment did not answer in time


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a task asks, a pure function of (seed, split, index)."""

    id: str  # "countdown/train/000123"
    task: str
    messages: tuple[Message, ...]
    answer: Any  # what this task's own `score` needs; plain data that can be pickled
    environment: str | None = None  # its name in a configuration, where the problem is an episode of it
    tools: tuple[Mapping[str, Any], ...] = ()  # that the policy may call, as chat templates take them
    takes_calls: bool = False  # an episode of an environment in TRL's shape: it gets the run's tools, too
    scored_by_task: bool = False  # an episode whose last turn the task scores, not the environment
    occurrence: int = 0  # how often it stands in its batch before this one

    @property
    def question(self) -> str:
        """The last message."""
        return self.messages[-1]["content"]

    @property
    def seed_parts(self) -> tuple[int | str, ...]:
        """Its part in the seeds of its samples: where it stands twice in a batch, these differ."""
        return (self.id, "occurrence", self.occurrence) if self.occurrence else (self.id,)

    @property
    def identity(self) -> str:
        """What distinguishes this problem from the others of its task: of an episode its row, or its seed."""
        question = normal_form(question_text(self.messages))
        if self.environment is None or self.scored_by_task:
            return question
        if row := self.answer.get("row"):
            return normal_form(json.dumps(row, sort_keys=True))
        return f"{question}\x1f{self.answer['seed']}"


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What an engine sampled for one prompt."""

    token_ids: tuple[int, ...]  # the stop token included
    logprobs: tuple[float, ...]  # of the sampling policy (temperature and filters applied), one per token
    finish: Finish
    policy_version: int  # number of weight updates the sampling policy had seen


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """An environment's judgement of an episode: what `Task.score_episode` gets."""

    reward: float | None  # None: it names none
    correct: bool | None
    last: str  # what the policy said last


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
class Turn:
    """What the policy said once, and what was put into its context before it speaks again."""

    completion: Completion  # sampled: trained on
    observation_ids: tuple[int, ...] = ()  # seen, never trained on; none behind the last turn
    # All that the policy saw before it spoke, where that is not the prompt and the turns before this one: the
    # history was rewritten. Never trained on here. Empty for the first turn.
    context_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Branch:
    """Turns of a rollout that continue each other: a segment of an episode, of which most have one.

    Its tokens are the first `num_shared` ones of branch `parent`, then `context_ids`, then its turns.
    """

    turns: tuple[Turn, ...]
    parent: int | None = None  # an earlier branch; None: of the first, which begins with the prompt
    num_shared: int = 0
    context_ids: tuple[int, ...] = ()

    @cached_property
    def own_ids(self) -> tuple[int, ...]:
        """Behind the shared tokens."""
        said_and_seen = [(turn.completion.token_ids, turn.observation_ids) for turn in self.turns]
        parts = [part for part in (self.context_ids, *chain.from_iterable(said_and_seen)) if part]
        return parts[0] if len(parts) == 1 else tuple(chain.from_iterable(parts))


@dataclass(frozen=True, kw_only=True)
class Episode:
    """What a rollout with an environment has beside its tokens."""

    finish: Finish
    messages: tuple[Message, ...]  # behind the prompt; what the policy said has its calls as `tool_calls`
    rewards: tuple[float, ...]  # of each turn; the environment's reward for the whole is in the score
    seconds: tuple[float, ...] = ()  # until the environment had answered each of them
    num_tool_calls: int = 0
    num_tool_errors: int = 0  # calls that failed or could not be read
    environment_s: float = 0.0  # waiting for the environment
    error: str | None = None  # why the environment failed
    is_silent: bool = False  # the policy was never asked: its one token is not in the loss


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A prompt and scored turns: one, without an observation, for tasks that have no environment."""

    prompt_ids: tuple[int, ...]
    turns: tuple[Turn, ...]
    text: str  # what the policy said, special tokens left out
    score: Score
    episode: Episode | None = None

    @cached_property
    def completion(self) -> Completion:
        """What the policy said in all turns: its tokens are those that are trained on and counted."""
        if len(self.turns) == 1 and self.episode is None:
            return self.turns[0].completion
        parts = [turn.completion for turn in self.turns]
        return Completion(
            token_ids=tuple(token for part in parts for token in part.token_ids),
            logprobs=tuple(logprob for part in parts for logprob in part.logprobs),
            finish=parts[-1].finish if self.episode is None else self.episode.finish,
            policy_version=min(part.policy_version for part in parts),
        )

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """The reward by turns: the last one has what the environment did not pay at a turn."""
        earned: list[float] = [0.0] * len(self.turns)
        if self.episode is not None and self.episode.error is None:
            for number, reward in enumerate(self.episode.rewards):
                earned[number] = reward
        earned[-1] += self.score.reward - sum(earned)
        return tuple(earned)

    @cached_property
    def branches(self) -> tuple[Branch, ...]:
        """One, unless the history was rewritten. What branches have in common at their start is in one."""
        starts = [0, *(number for number, turn in enumerate(self.turns) if turn.context_ids)]
        if len(starts) == 1:
            return (Branch(turns=self.turns),)
        branches: list[Branch] = []
        sequences: list[tuple[int, ...]] = []  # all tokens of each
        for start, stop in zip(starts, [*starts[1:], len(self.turns)], strict=True):
            turns, context = self.turns[start:stop], self.turns[start].context_ids
            if start == 0:
                branch, shared = Branch(turns=turns), self.prompt_ids
            else:
                parent, count = _longest_prefix(context, sequences)
                branch = Branch(turns=turns, parent=parent, num_shared=count, context_ids=context[count:])
                shared = context[:count]
            branches.append(branch)
            sequences.append(shared + branch.own_ids)
        return tuple(branches)

    @cached_property
    def num_tokens(self) -> int:
        """All tokens: prompt, completions and observations; what branches share counts once."""
        return len(self.prompt_ids) + sum(len(branch.own_ids) for branch in self.branches)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest branch, with what it shares."""
        shared = [len(self.prompt_ids), *(branch.num_shared for branch in self.branches[1:])]
        return max(n + len(branch.own_ids) for n, branch in zip(shared, self.branches, strict=True))

    @property
    def num_observed(self) -> int:
        """Tokens behind the prompt that the policy saw and did not say."""
        return self.num_tokens - len(self.prompt_ids) - len(self.completion.token_ids)


@dataclass(frozen=True, kw_only=True)
class Group:
    """All rollouts of one problem: baselines are taken inside it."""

    problem: Problem
    rollouts: tuple[Rollout, ...]

    def rewards_differ(self, *, by_turn: bool = False) -> bool:
        """Whether its rollouts have different rewards; `by_turn`: in any of their turns."""
        return len({r.turn_rewards if by_turn else r.score.reward for r in self.rollouts}) > 1


def count_occurrences(problems: Iterable[Problem]) -> list[Problem]:
    """The problems of a batch, each with how often it stands there before."""
    seen: Counter[str] = Counter()
    counted = []
    for problem in problems:
        counted.append(replace(problem, occurrence=seen[problem.id]) if seen[problem.id] else problem)
        seen[problem.id] += 1
    return counted


class Segment(NamedTuple):
    """Tokens of a packed batch. They see each other causally, and all of earlier runs: a shared prompt."""

    start: int
    length: int
    prefix: tuple[tuple[int, int], ...] = ()  # runs as (start, length), one sequence together

    @property
    def prefix_length(self) -> int:
        return sum(length for _, length in self.prefix)


def _longest_prefix(ids: tuple[int, ...], sequences: list[tuple[int, ...]]) -> tuple[int, int]:
    """(index, length) of the longest start of `ids` that one of `sequences` has; the newest of equals."""
    best, length = len(sequences) - 1, 0
    for index in reversed(range(len(sequences))):
        other = sequences[index]
        if length == len(ids):
            break
        if len(other) <= length or other[length] != ids[length]:
            continue  # not longer, so nothing is compared
        if (common := common_length(ids, other)) > length:
            best, length = index, common
    return best, length


def common_length(ids: Sequence[Any], other: Sequence[Any]) -> int:
    """With how many equal tokens or characters both begin."""
    low, high = 0, min(len(ids), len(other))
    while low < high:  # slices are compared much faster than tokens
        middle = (low + high + 1) // 2
        low, high = (middle, high) if ids[low:middle] == other[low:middle] else (low, middle - 1)
    return low
