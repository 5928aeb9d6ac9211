"""The built-in reward functions: the table `REWARDS`, the rewards for format and length, the weighted sum.

A new built-in reward is a function of `RewardContext` in this file and an entry in `REWARDS`. It returns a
number, or None where it does not apply to a completion.
"""

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from whetstone.config.sections import Config
from whetstone.errors import UserError
from whetstone.types import Problem, TaskScore

FORMAT_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_BLANK_LETTERS = "\u115f\u1160\u2800\u3164\uffa0"  # drawn as nothing, though Unicode calls them letters
_INVISIBLE = ("Cc", "Cf", "Cn", "Cs", "Mn", "Zl", "Zp", "Zs")  # controls, zero width, accents alone, spaces


def format_reward(text: str) -> float:
    """A quarter for each tag that occurs once and in order; an empty pair earns nothing."""
    positions: dict[str, int] = {}
    last_position = -1
    for tag in FORMAT_TAGS:
        position = text.find(tag)
        if position > last_position and text.count(tag) == 1:
            positions[tag] = last_position = position
    for opening, closing in (FORMAT_TAGS[:2], FORMAT_TAGS[2:]):
        start, end = text.find(opening), text.find(closing)
        if 0 <= start < end and not has_content(text[start + len(opening) : end]):
            positions.pop(opening, None)
            positions.pop(closing, None)
    return 0.25 * len(positions)


def has_content(text: str) -> bool:
    """Whether anything in a text can be seen."""
    return any(unicodedata.category(sign) not in _INVISIBLE and sign not in _BLANK_LETTERS for sign in text)


def overlong_penalty(num_tokens: int, max_tokens: int, buffer: int) -> float:
    """DAPO's soft overlong punishment: 0 up to max_tokens - buffer, then linear to -1 at max_tokens."""
    if buffer <= 0:
        return 0.0
    return max(-1.0, min(0.0, (max_tokens - buffer - num_tokens) / buffer))


@dataclass(frozen=True, kw_only=True)
class RewardContext:
    """What a built-in reward function sees of one completion."""

    config: Config
    problem: Problem
    text: str  # the completion behind `assistant_prefix`
    num_tokens: int
    task_score: TaskScore


@dataclass(frozen=True, kw_only=True)
class Reward:
    """A built-in reward: its function, and a check of the configuration before the run."""

    function: Callable[[RewardContext], float | None]
    check: Callable[[Config], None] = lambda config: None


def _overlong(context: RewardContext) -> float:
    limit = context.config.rollout.max_completion_length
    return overlong_penalty(context.num_tokens, limit, context.config.tasks.overlong_buffer_length)


def _check_overlong(config: Config) -> None:
    buffer, longest = config.tasks.overlong_buffer_length, config.rollout.max_completion_length
    if not 0 < buffer <= longest:
        raise UserError(
            "The length reward needs overlong_buffer_length between 1 and max_completion_length "
            f"({longest}), but it is {buffer}: set it to {max(1, longest // 4)}, say."
        )


TASK_REWARD = "accuracy"  # the entry that pays what the task says; a failed scoring pays its worst value
REWARDS: Mapping[str, Reward] = {
    TASK_REWARD: Reward(function=lambda context: context.task_score.reward),
    "format": Reward(function=lambda context: format_reward(context.text)),
    "length": Reward(function=_overlong, check=_check_overlong),
}


def part_names(reward_funcs: Sequence[str]) -> tuple[str, ...]:
    """The name of each part: the function's own name, or the whole spec where two share that name."""
    short_names = [name.rsplit(":", 1)[-1] for name in reward_funcs]
    return tuple(
        name if short_names.count(name) == 1 else spec
        for name, spec in zip(short_names, reward_funcs, strict=True)
    )


def combine(parts: Mapping[str, float], names: Sequence[str], weights: Sequence[float] | None) -> float:
    """The sum of weight x part over the named parts; a part that is absent does not apply and is left out."""
    weights = [1.0] * len(names) if weights is None else weights
    pairs = zip(names, weights, strict=True)
    return float(sum(weight * parts[name] for name, weight in pairs if name in parts))
