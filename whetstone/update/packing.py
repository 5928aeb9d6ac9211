"""Scored groups -> packed micro-batches.

Prompts and completions are laid end to end without padding, a prompt once for all its completions; only
completion tokens carry targets. One optimiser step is a list of `Batch`es. Does not run the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from whetstone.config import Config
from whetstone.types import Finish, Group, Rollout, Segment


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Prompts and completions end to end. T: all tokens; N: completion tokens; S: completions."""

    token_ids: Tensor  # [T]
    position_ids: Tensor  # [T], from 0 in every sequence
    segments: list[Segment]  # what sees what: a prompt, then the completions that share it, and so on
    rows: Tensor  # [N] the position in T whose hidden state predicts the token
    targets: Tensor  # [N] the token
    sequence: Tensor  # [N] which of the S completions it belongs to
    sampler_logprobs: Tensor  # [N]
    rewards: Tensor  # [S]
    places: Tensor  # [S] its place among all completions of the step: problem x group size + sample
    keep: Tensor  # [S] 1, or 0 for a completion that takes no part in the loss

    @property
    def num_sequences(self) -> int:
        return len(self.keep)

    def to(self, device: torch.device) -> "Batch":
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return Batch(segments=self.segments, **moved)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A rollout and its place among all of the step: the unit of packing."""

    rollout: Rollout
    place: int
    keep: bool

    @property
    def num_tokens(self) -> int:
        return len(self.rollout.prompt_ids) + len(self.rollout.completion.token_ids)


def minibatches(
    groups: Sequence[Group],
    config: Config,
    parts: int,
    seed: int,
    *,
    max_tokens: int,
    rank: int = 0,
    num_ranks: int = 1,
) -> list[list[Batch]]:
    """The micro-batches of each optimiser step of a batch of rollouts: those of `rank`, of which all have
    equally many.
    """
    done = []
    for part in split(make_samples(groups, config), parts, seed):
        shares = balance(part, num_ranks)
        bins = [arrange(share, max_tokens) for share in shares]
        idle = max(len(one) for one in bins) - len(bins[rank])
        mine = [_lay_end_to_end(samples) for samples in bins[rank]]
        done.append(mine + [_idle(part[0])] * idle)
    return done


def balance(samples: list[Sample], num_ranks: int) -> list[list[Sample]]:
    """Shares of about equally many tokens, one for each rank.

    Completions of one prompt stay together where that is fair enough, since they share it: whole groups are
    dealt out first, then halves, quarters and so on down to single completions, and the fairest deal is
    taken.
    """
    if num_ranks == 1:
        return [samples]
    by_prompt: dict[tuple[int, ...], list[Sample]] = {}
    for sample in samples:
        by_prompt.setdefault(sample.rollout.prompt_ids, []).append(sample)
    size = max(len(group) for group in by_prompt.values())
    deals = []
    while True:
        pieces = [group[i : i + size] for group in by_prompt.values() for i in range(0, len(group), size)]
        deals.append(_deal(pieces, num_ranks))
        if size == 1:
            break
        size = (size + 1) // 2
    return min(deals, key=lambda deal: max(_tokens(share) for share in deal))


def _deal(pieces: list[list[Sample]], num_ranks: int) -> list[list[Sample]]:
    """The largest piece first, each to whoever has least."""
    shares: list[list[Sample]] = [[] for _ in range(num_ranks)]
    tokens = [0] * num_ranks
    for piece in sorted(pieces, key=lambda piece: -_tokens(piece)):
        poorest = tokens.index(min(tokens))
        shares[poorest] += piece
        tokens[poorest] += _tokens(piece)
    return shares


def _tokens(samples: list[Sample]) -> int:
    """Tokens that have to be run: a prompt counts once."""
    prompts = {sample.rollout.prompt_ids for sample in samples}
    completions = sum(len(sample.rollout.completion.token_ids) for sample in samples)
    return sum(len(prompt) for prompt in prompts) + completions


def make_samples(groups: Sequence[Group], config: Config) -> list[Sample]:
    """One sample per rollout, in order; truncated ones are left out of the loss where the configuration says
    so.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    mask = config.loss.mask_truncated_completions
    return [
        Sample(rollout=rollout, place=place, keep=not (mask and rollout.completion.finish is Finish.LENGTH))
        for place, rollout in enumerate(rollouts)
    ]


def split(samples: list[Sample], parts: int, seed: int) -> list[list[Sample]]:
    """Shuffle and cut into equal parts, one optimiser step each. A single part keeps its order."""
    if parts == 1:
        return [samples]
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed)).tolist()
    size = len(samples) // parts
    return [[samples[i] for i in order[part * size : (part + 1) * size]] for part in range(parts)]


def pack(samples: list[Sample], max_tokens: int) -> list[Batch]:
    """`samples` as micro-batches."""
    return [_lay_end_to_end(full) for full in arrange(samples, max_tokens)]


def arrange(samples: list[Sample], max_tokens: int) -> list[list[Sample]]:
    """Which samples go together: micro-batches of at most `max_tokens` tokens (a longer sequence gets one
    of its own), of like lengths.

    Completions of the same prompt stand together and share it: it is run once, not once for each.
    """
    by_prompt: dict[tuple[int, ...], list[Sample]] = {}
    for sample in sorted(samples, key=lambda sample: -len(sample.rollout.completion.token_ids)):
        by_prompt.setdefault(sample.rollout.prompt_ids, []).append(sample)
    bins: list[_Bin] = [_Bin()]
    for prompt in sorted(by_prompt, key=lambda prompt: -sum(s.num_tokens for s in by_prompt[prompt])):
        for sample in by_prompt[prompt]:
            if bins[-1].samples and bins[-1].num_tokens + bins[-1].cost(sample) > max_tokens:
                bins.append(_Bin())
            bins[-1].add(sample)
    return [full.samples for full in bins if full.samples]


class _Bin:
    """Samples for one micro-batch, those of one prompt together."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.num_tokens = 0

    def cost(self, sample: Sample) -> int:
        """Tokens that one more sample adds: its prompt counts only if it is not there already."""
        shared = self.samples and self.samples[-1].rollout.prompt_ids == sample.rollout.prompt_ids
        return len(sample.rollout.completion.token_ids) if shared else sample.num_tokens

    def add(self, sample: Sample) -> None:
        self.num_tokens += self.cost(sample)
        self.samples.append(sample)


def _idle(sample: Sample) -> Batch:
    """A micro-batch without completions for a rank that has no more work: it runs a bit of a prompt, so that
    it takes part in what the ranks do together, and adds nothing. Two tokens, since layers would be compiled
    anew for a single one.
    """
    none, no_numbers = torch.zeros(0, dtype=torch.long), torch.zeros(0)
    ids = sample.rollout.prompt_ids
    return Batch(
        token_ids=torch.tensor([ids[0], ids[-1]]),
        position_ids=torch.arange(2),
        segments=[Segment(0, 2)],
        rows=none,
        targets=none,
        sequence=none,
        sampler_logprobs=no_numbers,
        rewards=no_numbers,
        places=none,
        keep=no_numbers,
    )


def _lay_end_to_end(samples: list[Sample]) -> Batch:
    tokens: list[tuple[int, ...]] = []
    positions: list[range] = []
    rows: list[range] = []
    segments: list[Segment] = []
    prompt: tuple[int, ...] = ()  # no prompt is empty
    prompt_start = end = 0
    for sample in samples:
        completion = sample.rollout.completion.token_ids
        if sample.rollout.prompt_ids != prompt:
            prompt, prompt_start = sample.rollout.prompt_ids, end
            segments.append(Segment(prompt_start, len(prompt)))
            tokens.append(prompt)
            positions.append(range(len(prompt)))
            end += len(prompt)
        segments.append(Segment(end, len(completion), prompt_start, len(prompt)))
        # The last prompt token predicts the first completion token, and each token the next one.
        last = prompt_start + len(prompt) - 1
        rows += [range(last, last + 1), range(end, end + len(completion) - 1)]
        tokens.append(completion)
        positions.append(range(len(prompt), len(prompt) + len(completion)))
        end += len(completion)
    completions = [sample.rollout.completion for sample in samples]
    lengths = torch.tensor([len(completion.token_ids) for completion in completions])
    return Batch(
        token_ids=_joined(tokens),
        position_ids=_runs(positions),
        segments=segments,
        rows=_runs(rows),
        targets=_joined([completion.token_ids for completion in completions]),
        sequence=torch.arange(len(samples)).repeat_interleave(lengths),
        sampler_logprobs=_joined([completion.logprobs for completion in completions], np.float32),
        rewards=torch.tensor([sample.rollout.score.reward for sample in samples]),
        places=torch.tensor([sample.place for sample in samples]),
        keep=torch.tensor([float(sample.keep) for sample in samples]),
    )


def _joined(parts: Sequence[Sequence[float]], dtype: type = np.int64) -> Tensor:
    """Numbers end to end. Through numpy, which reads tuples several times as fast as torch does."""
    return torch.from_numpy(np.concatenate([np.array(part, dtype=dtype) for part in parts]))


def _runs(parts: list[range]) -> Tensor:
    return torch.cat([torch.arange(part.start, part.stop) for part in parts])


def halves_of(batch: Batch) -> list[Batch]:
    """The same in two micro-batches, half of the completions each; one completion stays whole."""
    total = batch.num_sequences
    if total < 2:
        return [batch]
    return [cut_out(batch, *ends)[0] for ends in ((0, total // 2), (total // 2, total))]


def cut_out(batch: Batch, first: int, last: int) -> tuple[Batch, Tensor]:
    """Completions `first` to `last` of a batch, with the prompts they need, and which of its N tokens these
    are.
    """
    device = batch.token_ids.device
    kept = [segment for segment in batch.segments if segment.prefix_length][first:last]
    segments: list[Segment] = []
    source: list[range] = []  # where the tokens lay
    prompt_start, start, end = -1, 0, 0
    for segment in kept:
        if segment.prefix_start != prompt_start:
            prompt_start, start = segment.prefix_start, end
            segments.append(Segment(start, segment.prefix_length))
            source.append(range(prompt_start, prompt_start + segment.prefix_length))
            end += segment.prefix_length
        segments.append(Segment(end, segment.length, start, segment.prefix_length))
        source.append(range(segment.start, segment.start + segment.length))
        end += segment.length
    index = _runs(source).to(device)
    now = torch.full_like(batch.token_ids, -1)
    now[index] = torch.arange(len(index), device=device)
    mine = (batch.sequence >= first) & (batch.sequence < last)
    part = Batch(
        token_ids=batch.token_ids[index],
        position_ids=batch.position_ids[index],
        segments=segments,
        rows=now[batch.rows[mine]],
        targets=batch.targets[mine],
        sequence=batch.sequence[mine] - first,
        sampler_logprobs=batch.sampler_logprobs[mine],
        rewards=batch.rewards[first:last],
        places=batch.places[first:last],
        keep=batch.keep[first:last],
    )
    return part, mine
