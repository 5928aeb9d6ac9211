"""Prompts that begin alike (a system message, the description of tools, examples) share that beginning in a
packed batch: it is computed once. Neither sums nor gradients change, but for the order of additions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from whetstone.types import Segment, common_length

Run = tuple[int, int]  # start and length of tokens in a packed batch
MIN_SHARED = 64  # tokens; attention to a shared beginning is not free
# Shared in multiples of this. Prompts that differ a token earlier or later then share the same run: six tasks
# behind one system message had five runs otherwise, most of them of a few tokens.
SHARED_STEP = 32


@dataclass(frozen=True)
class PlacedPrompt:
    """A prompt in a packed batch: where its own tokens are, behind those that an earlier prompt has."""

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
    count = 0 if previous is None else num_shared(previous.ids, ids)
    prefix = first_tokens(previous.runs, count) if previous is not None and count else ()
    return PlacedPrompt(ids, Segment(start, len(ids) - count, prefix))


def num_shared(ids: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens `other` takes from `ids`, which comes before it: never its last, which predicts."""
    if ids[:MIN_SHARED] != other[:MIN_SHARED]:
        return 0
    count = min(common_length(ids, other), len(other) - 1) // SHARED_STEP * SHARED_STEP
    return count if count >= MIN_SHARED else 0


def begin_alike(prompts: Sequence[tuple[int, ...]]) -> bool:
    """Whether any two of them do, so that sorting brings them together."""
    return len({ids[:MIN_SHARED] for ids in prompts}) < len(prompts)


def nums_shared(prompts: Sequence[tuple[int, ...]]) -> list[int]:
    """What each takes from the one before it."""
    return [0, *(num_shared(ids, other) for ids, other in pairwise(prompts))][: len(prompts)]


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
