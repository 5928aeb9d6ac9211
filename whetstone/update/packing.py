"""Scored groups -> packed micro-batches without padding; completions of one prompt share its tokens, and
prompts with a common prefix share that.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np
import torch
from torch import Tensor

from whetstone.config import Config
from whetstone.model.shared_prefixes import (
    PlacedPrompt,
    Run,
    first_tokens,
    have_common_prefix,
    place_prompt,
    shared_lengths,
)
from whetstone.types import Branch, Finish, Group, Rollout, Segment


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Packed prompts and completions. T: all tokens; N: completion tokens; S: completions."""

    token_ids: Tensor  # [T]
    position_ids: Tensor  # [T], from 0 in every sequence
    segments: list[Segment]  # attention: a prompt, then the branches of rollouts that share it, and so on
    logit_positions: Tensor  # [N] the position in T whose hidden state predicts the token
    targets: Tensor  # [N] the token
    sequence_ids: Tensor  # [N] which of the S completions it belongs to
    turn_ids: Tensor  # [N] which column of `rewards`
    sampler_logprobs: Tensor  # [N]
    rewards: Tensor  # [S, turns]; one column unless turns are credited separately
    batch_index: Tensor  # [S] index among all completions of the step: problem x group size + sample
    sequence_mask: Tensor  # [S] 1, or 0 for a completion that is not in the loss
    samples: list["Sample"]  # [S] what was packed
    is_skipped: bool = False  # no gradient: counted in the averages of the step, but not computed

    @property
    def num_sequences(self) -> int:
        return len(self.sequence_mask)

    def to(self, device: torch.device) -> "Batch":
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A rollout and its index among all of the step: the unit of packing."""

    rollout: Rollout
    index: int
    keep: bool  # in the loss
    skip: bool = False  # its advantage is 0, and nothing else of it has a gradient
    by_turn: bool = False  # whether its turns are credited separately

    @property
    def num_tokens(self) -> int:
        return self.rollout.num_tokens

    @property
    def rewards(self) -> tuple[float, ...]:
        return self.rollout.turn_rewards if self.by_turn else (self.rollout.score.reward,)

    @property
    def num_response_tokens(self) -> int:
        """Tokens behind the prompt: completions and observations, of all branches."""
        return self.rollout.num_tokens - len(self.rollout.prompt_ids)


def pack_minibatches(
    groups: Sequence[Group],
    config: Config,
    num_minibatches: int,
    seed: int,
    *,
    max_tokens: int,
    counts_shared: bool = False,
    rank: int = 0,
    num_ranks: int = 1,
) -> list[list[Batch]]:
    """The micro-batches of `rank` for each minibatch (optimizer step); all ranks have equally many.

    `counts_shared`: what prompts have in common counts for each, where every sequence is run whole (padded).
    """
    packed = []
    for minibatch in split_minibatches(make_samples(groups, config), num_minibatches, seed):
        # The first sample is kept where none has a gradient, for the metrics.
        trained = [sample for sample in minibatch if not sample.skip] or minibatch[:1]
        skipped = [sample for sample in minibatch if sample.skip and sample is not trained[0]]
        by_rank = balance(trained, num_ranks)
        bins = [bin_pack(samples, max_tokens, counts_shared=counts_shared) for samples in by_rank]
        num_empty = max(map(len, bins)) - len(bins[rank])
        batches = [pack_sequences(samples) for samples in bins[rank]]
        batches += [empty_micro_batch(minibatch[0])] * num_empty
        if share := skipped[rank::num_ranks]:
            batches.append(replace(pack_sequences(share), is_skipped=True))
        packed.append(batches)
    return packed


def balance(samples: list[Sample], num_ranks: int) -> list[list[Sample]]:
    """Partition samples into `num_ranks` lists of about equally many tokens.

    Completions of one prompt stay together where possible, since they share it. Partitions of whole groups,
    halves, quarters and so on down to single completions are compared; the most balanced one is returned.
    """
    if num_ranks == 1:
        return [samples]
    groups = _by_prompt(samples).values()
    sizes = [max(map(len, groups))]
    while sizes[-1] > 1:
        sizes.append((sizes[-1] + 1) // 2)
    partitions = []
    for size in sizes:
        pieces = [group[i : i + size] for group in groups for i in range(0, len(group), size)]
        partitions.append(_greedy_partition(pieces, num_ranks))
    return min(partitions, key=lambda partition: max(map(_num_tokens, partition)))


def _greedy_partition(pieces: list[list[Sample]], num_ranks: int) -> list[list[Sample]]:
    """The largest piece first, each to the rank with the fewest tokens."""
    partition: list[list[Sample]] = [[] for _ in range(num_ranks)]
    tokens = [0] * num_ranks
    for piece in sorted(pieces, key=lambda piece: -_num_tokens(piece)):
        rank = tokens.index(min(tokens))
        partition[rank] += piece
        tokens[rank] += _num_tokens(piece)
    return partition


def _num_tokens(samples: list[Sample]) -> int:
    """Tokens of the packed samples: a shared prompt counts once."""
    prompts = {sample.rollout.prompt_ids for sample in samples}
    return sum(len(prompt) for prompt in prompts) + sum(sample.num_response_tokens for sample in samples)


def make_samples(groups: Sequence[Group], config: Config) -> list[Sample]:
    """One sample per rollout, in order; `mask_truncated_completions` takes truncated ones out of the loss."""
    mask, samples = config.loss.mask_truncated_completions, []
    by_turn = config.environments.turn_credit == "turn"
    for group in groups:
        skip = config.skips_zero_advantages and not group.rewards_differ(by_turn=by_turn)
        for rollout in group.rollouts:
            keep = not (mask and rollout.completion.finish is Finish.LENGTH)
            keep = keep and not (rollout.episode is not None and rollout.episode.is_silent)
            samples.append(Sample(rollout=rollout, index=len(samples), keep=keep, skip=skip, by_turn=by_turn))
    return samples


def split_minibatches(samples: list[Sample], num_minibatches: int, seed: int) -> list[list[Sample]]:
    """Shuffle and split as equally as possible, one optimizer step each. A single minibatch keeps its order.

    Samples occur again where there are fewer than minibatches (rejection sampling): none is empty.
    """
    if num_minibatches == 1:
        return [samples]
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed)).tolist()
    order = (order * num_minibatches)[: max(len(order), num_minibatches)]
    bounds = [n * len(order) // num_minibatches for n in range(num_minibatches + 1)]
    return [[samples[i] for i in order[start:stop]] for start, stop in pairwise(bounds)]


def pack(samples: list[Sample], max_tokens: int) -> list[Batch]:
    """`samples` as micro-batches."""
    return [pack_sequences(chosen) for chosen in bin_pack(samples, max_tokens)]


def bin_pack(samples: list[Sample], max_tokens: int, *, counts_shared: bool = False) -> list[list[Sample]]:
    """Bins of at most `max_tokens`, or one longer sequence; completions of one prompt are adjacent.

    As few as fill up one after another, but of about equal size: the host can't launch the layers of a short
    one as fast as a GPU runs them.
    """
    groups, shared = _ordered_groups(samples)
    ordered = [sample for group in groups for sample in group]
    # What each costs after the one before it, which may have the same prompt or share a prefix.
    costs = [
        sample.num_response_tokens if number else sample.num_tokens - (0 if counts_shared else count)
        for group, count in zip(groups, shared, strict=True)
        for number, sample in enumerate(group)
    ]
    starts = _bin_starts(ordered, costs, max_tokens)
    low, high = sum(costs) // max(1, len(starts)), max_tokens
    while high - low > max(1, max_tokens // 64):
        middle = (low + high) // 2
        smaller = _bin_starts(ordered, costs, middle)
        if len(smaller) > len(starts):
            low = middle
        else:
            starts, high = smaller, middle
    return [ordered[start:stop] for start, stop in zip(starts, [*starts, len(ordered)][1:], strict=True)]


def _bin_starts(ordered: list[Sample], costs: list[int], max_tokens: int) -> list[int]:
    """The index of the first sample of each bin."""
    starts: list[int] = []
    num_tokens = 0  # of the last bin
    for index, cost in enumerate(costs):
        if not starts or num_tokens + cost > max_tokens:
            starts.append(index)
            num_tokens, cost = 0, ordered[index].num_tokens
        num_tokens += cost
    return starts


def _ordered_groups(samples: list[Sample]) -> tuple[list[list[Sample]], list[int]]:
    """Samples by prompt, and how many tokens each prompt takes from the one before it. The largest group is
    first, unless prompts have a common prefix: then those are neighbors.
    """
    by_prompt = _by_prompt(sorted(samples, key=lambda sample: -sample.num_response_tokens))
    if have_common_prefix(list(by_prompt)):
        prompts = sorted(by_prompt)
        return [by_prompt[prompt] for prompt in prompts], shared_lengths(prompts)
    groups = sorted(by_prompt.values(), key=lambda group: -sum(sample.num_tokens for sample in group))
    return groups, [0] * len(groups)


def _by_prompt(samples: list[Sample]) -> dict[tuple[int, ...], list[Sample]]:
    groups: dict[tuple[int, ...], list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.rollout.prompt_ids, []).append(sample)
    return groups


def empty_micro_batch(sample: Sample) -> Batch:
    """A micro-batch without completions, so that a rank without work takes part in collectives.

    Two prompt tokens: a single one would compile the layers again.
    """
    ids = sample.rollout.prompt_ids
    id_names = ("logit_positions", "targets", "sequence_ids", "turn_ids", "batch_index")
    no_ids = dict.fromkeys(id_names, torch.arange(0))
    no_floats = dict.fromkeys(("sampler_logprobs", "sequence_mask"), torch.zeros(0))
    return Batch(
        token_ids=torch.tensor([ids[0], ids[-1]]),
        position_ids=torch.arange(2),
        segments=[Segment(0, 2)],
        rewards=torch.zeros(0, 1),
        samples=[],
        **no_ids,
        **no_floats,
    )


def pack_sequences(samples: list[Sample]) -> Batch:
    """One micro-batch of all `samples`."""
    tokens: list[tuple[int, ...]] = []
    positions: list[range] = []
    logit_positions: list[range] = []
    target_positions: list[range] = []
    segments: list[Segment] = []
    prompt: PlacedPrompt | None = None
    end = 0
    for sample in samples:
        if prompt is None or sample.rollout.prompt_ids != prompt.ids:
            prompt = place_prompt(sample.rollout.prompt_ids, end, prompt)
            segments.append(prompt.segment)
            tokens.append(prompt.own_ids)
            positions.append(prompt.positions)
            end += prompt.segment.length
        placed: list[tuple[Run, ...]] = []  # where the tokens of each branch are
        for branch in sample.rollout.branches:
            prefix: tuple[Run, ...] = prompt.runs
            if branch.parent is not None:
                prefix = first_tokens(placed[branch.parent], branch.num_shared)
            segments.append(Segment(end, len(branch.own_ids), prefix))
            placed.append((*prefix, (end, len(branch.own_ids))))
            first = segments[-1].prefix_length
            positions.append(range(first, first + len(branch.own_ids)))
            tokens.append(branch.own_ids)
            for before, sampled in _sampled(branch, segments[-1]):
                logit_positions += [range(before, before + 1), sampled[:-1]]
                target_positions.append(sampled)
            end += len(branch.own_ids)
    completions = [sample.rollout.completion for sample in samples]
    lengths = [len(completion.token_ids) for completion in completions]
    rewards, turn_ids = _turns(samples, sum(lengths))
    token_ids = _concat(tokens)
    return Batch(
        token_ids=token_ids,
        position_ids=_aranges(positions),
        segments=segments,
        logit_positions=_aranges(logit_positions),
        targets=token_ids[_aranges(target_positions)],
        sequence_ids=_repeated(range(len(samples)), lengths),
        sampler_logprobs=_concat([completion.logprobs for completion in completions], np.float32),
        turn_ids=turn_ids,
        rewards=rewards,
        batch_index=torch.tensor([sample.index for sample in samples]),
        sequence_mask=torch.tensor([float(sample.keep) for sample in samples]),
        samples=samples,
    )


def _sampled(branch: Branch, segment: Segment) -> Iterator[tuple[int, range]]:
    """Where the tokens of each turn are, which the policy sampled, and where the token before them is."""
    start = segment.start + len(branch.context_ids)
    # The first turn follows the context or, where there is none, what was shared.
    before = start - 1 if branch.context_ids else sum(segment.prefix[-1]) - 1
    for turn in branch.turns:
        stop = start + len(turn.completion.token_ids)
        yield before, range(start, stop)
        start = stop + len(turn.observation_ids)
        before = start - 1


def _turns(samples: list[Sample], num_tokens: int) -> tuple[Tensor, Tensor]:
    """Rewards [S, turns], and the turn of every completion token."""
    rewards = [sample.rewards for sample in samples]
    width = max(map(len, rewards))
    if width == 1:
        return torch.tensor(rewards), torch.zeros(num_tokens, dtype=torch.int64)
    lengths = [[len(turn.completion.token_ids) for turn in sample.rollout.turns] for sample in samples]
    numbers = [number for turns in lengths for number in range(len(turns))]
    padded = torch.tensor([[*earned, *[0.0] * (width - len(earned))] for earned in rewards])
    return padded, _repeated(numbers, [length for turns in lengths for length in turns])


# Through numpy: a GPU waits for this, and torch takes several times as long for tuples and short ranges.


def _concat(parts: Sequence[Sequence[float]], dtype: type = np.int64) -> Tensor:
    count = sum(map(len, parts))
    return torch.from_numpy(np.fromiter(chain.from_iterable(parts), dtype=dtype, count=count))


def _repeated(values: Sequence[int], counts: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.repeat(np.array(values, dtype=np.int64), counts))


def _aranges(parts: Sequence[range]) -> Tensor:
    """The numbers of all ranges, one after the other."""
    lengths = np.array([len(part) for part in parts], dtype=np.int64)
    ends = lengths.cumsum()
    shifts = np.array([part.start for part in parts], dtype=np.int64) - (ends - lengths)
    return torch.from_numpy(np.arange(lengths.sum()) + np.repeat(shifts, lengths))


def split_batch(batch: Batch) -> list[Batch]:
    """Two micro-batches with half of the completions each; a single completion stays whole."""
    total = batch.num_sequences
    halves = ((0, total // 2), (total // 2, total))
    return [batch] if total < 2 else [slice_sequences(batch, *half)[0] for half in halves]


def slice_sequences(batch: Batch, first: int, last: int) -> tuple[Batch, Tensor]:
    """Completions `first` to `last` with their prompts, and the mask of their tokens among the N."""
    part = replace(pack_sequences(batch.samples[first:last]), is_skipped=batch.is_skipped)
    mask = (batch.sequence_ids >= first) & (batch.sequence_ids < last)
    return part.to(batch.token_ids.device), mask
