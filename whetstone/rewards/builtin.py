"""The built-in reward functions: the table `REWARDS`, and the rewards for format and length.

A new built-in reward is a function of `RewardContext` in this file and an entry in `REWARDS`. It returns a
number, or None where it does not apply to a completion.
"""

import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from whetstone.config.sections import Config
from whetstone.errors import UserError
from whetstone.types import Problem, TaskScore

FORMAT_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_BLANK_LETTERS = "\u115f\u1160\u2800\u3164\uffa0"  # drawn as nothing, though Unicode calls them letters
_INVISIBLE = ("Cc", "Cf", "Cn", "Cs", "Mn", "Zl", "Zp", "Zs")  # controls, zero width, accents alone, spaces


def format_reward(text: str, assistant_prefix: str = "") -> float:
    """A quarter for each of the four tags that occurs exactly once and stands after those before it.

    A pair of tags with nothing visible between them earns nothing.
    `assistant_prefix` is what the prompt put into the assistant's mouth ("...<think>"): it counts as written.
    """
    full_text = assistant_prefix + text
    positions: dict[str, int] = {}
    last_position = -1
    for tag in FORMAT_TAGS:
        position = full_text.find(tag)
        if position > last_position and full_text.count(tag) == 1:
            positions[tag] = last_position = position
    for opening, closing in (FORMAT_TAGS[:2], FORMAT_TAGS[2:]):
        start, end = full_text.find(opening), full_text.find(closing)
        if 0 <= start < end and not has_content(full_text[start + len(opening) : end]):
            positions.pop(opening, None)
            positions.pop(closing, None)
    return 0.25 * len(positions)


def has_content(text: str) -> bool:
    """Whether anything in a text can be seen."""
    return any(unicodedata.category(sign) not in _INVISIBLE and sign not in _BLANK_LETTERS for sign in text)


def overlong_penalty(num_tokens: int, max_tokens: int, buffer: int) -> float:
    """DAPO's soft overlong punishment: 0 up to max_tokens - buffer, then linearly down to -1 at
    max_tokens.
    """
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
            f"({longest}), but it is {buffer}: "
            f"set it to {max(1, longest // 4)}, say."
        )


TASK_REWARD = "accuracy"  # the entry that pays what the task says; a failed scoring pays its worst value
REWARDS: Mapping[str, Reward] = {
    TASK_REWARD: Reward(function=lambda context: context.task_score.reward),
    "format": Reward(function=lambda context: format_reward(context.text)),
    "length": Reward(function=_overlong, check=_check_overlong),
}
