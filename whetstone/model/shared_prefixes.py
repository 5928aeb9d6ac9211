"""The common prefix of several prompts (a system message, descriptions of tools, examples) is computed once
in a packed batch. Neither sums nor gradients change, except for the order of additions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from whetstone.types import Segment, common_length

Run = tuple[int, int]  # start and length of tokens in a packed batch
MIN_PREFIX = 64  # tokens; attention to a shared prefix is not free
# Prefixes are multiples of this. Prompts that differ a token earlier or later then share the same run: six
# tasks after one system message had five runs otherwise, most of them of a few tokens.
PREFIX_STEP = 32


@dataclass(frozen=True)
class PlacedPrompt:
    """A prompt in a packed batch: its own tokens, and the prefix that an earlier prompt holds."""

    ids: tuple[int, ...]
    segment: Segment

    @property
    def own_ids(self) -> tuple[int, ...]:
        return self.ids[self.segment.prefix_length :]

    @property
    def positions(self) -> range:
        """Of its own tokens in the prompt."""
        return range(self.segment.prefix_length, len(self.ids))

    @property
    def last_token(self) -> int:
        """Where its last token is, whose hidden state predicts the first of the completion."""
        return self.segment.start + self.segment.length - 1

    @property
    def runs(self) -> tuple[Run, ...]:
        """Where all of its tokens are."""
        return *self.segment.prefix, (self.segment.start, self.segment.length)


def place_prompt(ids: tuple[int, ...], start: int, previous: PlacedPrompt | None) -> PlacedPrompt:
    """A prompt whose own tokens begin at `start`; `previous` is one that was placed before."""
    count = 0 if previous is None else shared_length(previous.ids, ids)
    prefix = first_tokens(previous.runs, count) if previous is not None and count else ()
    return PlacedPrompt(ids, Segment(start, len(ids) - count, prefix))


def shared_length(ids: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Length of the prefix that `other` shares with `ids`, which precedes it: never its last token, which
    predicts.
    """
    if ids[:MIN_PREFIX] != other[:MIN_PREFIX]:
        return 0
    count = min(common_length(ids, other), len(other) - 1) // PREFIX_STEP * PREFIX_STEP
    return count if count >= MIN_PREFIX else 0


def have_common_prefix(prompts: Sequence[tuple[int, ...]]) -> bool:
    """Whether any two prompts have one, so that sorting makes them neighbors."""
    return len({ids[:MIN_PREFIX] for ids in prompts}) < len(prompts)


def shared_lengths(prompts: Sequence[tuple[int, ...]]) -> list[int]:
    """`shared_length` of each prompt and the one before it."""
    return [0, *(shared_length(ids, other) for ids, other in pairwise(prompts))][: len(prompts)]


def first_tokens(runs: Sequence[Run], count: int) -> tuple[Run, ...]:
    """The runs of the first `count` tokens."""
    chosen: list[Run] = []
    for start, length in runs:
        if count > 0:
            chosen.append((start, min(length, count)))
            count -= length
    return tuple(chosen)


def token_index(runs: Iterable[Run]) -> list[int]:
    """The tokens of runs, one by one."""
    return list(chain.from_iterable(range(start, start + length) for start, length in runs))
