"""Common prefixes of prompts: what is shared, and that nothing but the work changes."""

from dataclasses import replace

import pytest
import torch

from tests.conftest import make_policy
from tests.support.engines import collect, trainer_logprobs
from tests.support.update import (
    gradient_of,
    make_samples,
    packed_and_padded,
    reference_gradient,
    rewritten,
    updater_for,
    with_turns,
)
from whetstone.engines.base import Request, SamplingParams
from whetstone.engines.native import NativeEngine
from whetstone.model import shared_prefixes
from whetstone.model.adapters import AdapterLinear, AdapterSelection
from whetstone.model.policy import Policy
from whetstone.model.shared_prefixes import (
    first_tokens,
    have_common_prefix,
    place_prompt,
    shared_length,
    shared_lengths,
)
from whetstone.types import Segment
from whetstone.update.packing import Batch, Sample, bin_pack, pack, pack_sequences

START = (*range(3, 83), *range(3, 19))  # 96 tokens of a system message
OTHER = START[::-1]


def behind(start: tuple[int, ...], samples: list[Sample]) -> list[Sample]:
    """The same rollouts, their prompts behind `start`."""
    changed = []
    for sample in samples:
        turns = tuple(
            replace(turn, context_ids=(*start, *turn.context_ids)) if turn.context_ids else turn
            for turn in sample.rollout.turns
        )
        rollout = replace(sample.rollout, prompt_ids=(*start, *sample.rollout.prompt_ids), turns=turns)
        changed.append(replace(sample, rollout=rollout))
    return changed


def numbered(*lists: list[Sample]) -> list[Sample]:
    return [replace(sample, index=n) for n, sample in enumerate(s for samples in lists for s in samples)]


def sequences_of(batch: Batch) -> list[Segment]:
    """The segments of completions: a prompt comes before its first one."""
    prompts = [sample.rollout.prompt_ids for sample in batch.samples]
    is_first = [number == 0 or prompts[number - 1] != ids for number, ids in enumerate(prompts)]
    return [batch.segments[number + sum(is_first[: number + 1])] for number in range(len(prompts))]


def test_what_a_prompt_takes_from_the_one_before_it():
    assert shared_length((*START, 1), (*START, 2, 5)) == 96
    assert shared_length((*START, 1, 2, 3), (*START, 1, 2, 5)) == 96  # in steps of 32
    assert shared_length(START, START) == 64  # its last token predicts, so it is its own
    assert shared_length((*START, 1, 2), START) == 64
    assert shared_length(START[:64], START[:64]) == 0  # 63 are too few
    assert shared_length(START[:64], START[:65]) == 64
    assert shared_length(START, OTHER) == shared_length(START, ()) == shared_length((), START) == 0
    assert shared_lengths([]) == [] and shared_lengths([START]) == [0]
    more = (*START, *range(1, 33))
    prompts = [START, (*more, 1), (*more, 2), (*more, 1, 4), (*START, 7)]
    assert shared_lengths(prompts) == [0, 96, 128, 128, 96]
    assert have_common_prefix([(*START, 1), OTHER, (*START, 2)]) and not have_common_prefix([START, OTHER])


def test_prompts_are_placed_behind_what_they_share():
    first = place_prompt((*START, 1, 2), 0, None)
    assert (first.segment, first.own_ids, first.last_token) == (Segment(0, 98), (*START, 1, 2), 97)
    more = (1, *range(40, 71), 6)  # a token of the first and 31 others, shared by two
    second = place_prompt((*START, *more), 98, first)
    assert second.segment == Segment(98, 33, ((0, 96),)) and second.own_ids == more
    assert list(second.positions) == [*range(96, 129)] and second.last_token == 130
    third = place_prompt((*START, *more, 9), 131, second)
    assert third.segment == Segment(131, 2, ((0, 96), (98, 32))) and third.runs[-1] == (131, 2)
    assert shared_prefixes.token_index(third.runs) == [*range(96), *range(98, 130), 131, 132]
    assert place_prompt(OTHER, 133, third).segment == Segment(133, 96)
    assert first_tokens(third.runs, 97) == ((0, 96), (98, 1))


def test_prompts_with_unequal_common_prefixes_share_one_run():
    """A run for each would be too many for the tiles of attention, which take four."""
    placed = None
    for number in range(20):
        end = 0 if placed is None else placed.last_token + 1
        placed = place_prompt((*START, *range(30, 30 + number), 5, 6), end, placed)
        assert placed.segment.prefix == (() if number == 0 else ((0, 96),))


def test_a_batch_has_a_prefix_once_and_keeps_its_budget():
    policy = make_policy()
    alone = make_samples(policy)
    samples = numbered(behind(START, alone), behind(OTHER, alone))
    [batch] = pack(samples, 1000)
    [short] = pack(alone, 1000)
    assert len(batch.token_ids) == 2 * (96 + len(short.token_ids))
    # One prompt of each prefix is whole; the other two, of 4, 8 or 9 more tokens, take it from there.
    assert [segment.prefix_length for segment in batch.segments].count(0) == 2
    for sample, segment in zip(batch.samples, sequences_of(batch), strict=True):
        ids = (*sample.rollout.prompt_ids, *sample.rollout.completion.token_ids)
        index = shared_prefixes.token_index((*segment.prefix, (segment.start, segment.length)))
        assert tuple(batch.token_ids[index].tolist()) == ids
        assert batch.position_ids[index].tolist() == list(range(len(ids)))
    for budget in (130, 170, 300):
        bins = bin_pack(samples, budget)
        assert sorted(sample.index for chosen in bins for sample in chosen) == list(range(len(samples)))
        assert all(len(pack_sequences(chosen).token_ids) <= budget for chosen in bins)
    # Where every sequence is run whole, as many are in a batch as without a shared prefix.
    prompts = sorted({sample.rollout.prompt_ids for sample in samples})
    for chosen in bin_pack(samples, 300, counts_shared=True):
        own = [len(ids) for ids in prompts if any(s.rollout.prompt_ids == ids for s in chosen)]
        assert sum(own) + sum(sample.num_response_tokens for sample in chosen) <= 300


@pytest.mark.parametrize("change", [list, with_turns, rewritten])
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_the_gradient_is_that_of_batches_that_share_nothing(monkeypatch, change, architecture):
    policy = make_policy(architecture)
    samples = change(make_samples(policy, sampler_shift=0.1))
    samples = numbered(behind(START, samples), behind((*START[:70], 9), samples), behind(OTHER, samples))
    gradients, sizes = [], []
    for least, budget in ((64, 1000), (64, 150), (1 << 30, 1000)):
        monkeypatch.setattr(shared_prefixes, "MIN_PREFIX", least)
        batches = pack(samples, budget)
        sizes.append(sum(len(batch.token_ids) for batch in batches))
        gradients.append(gradient_of(updater_for(policy), batches)[0])
        policy.model.zero_grad()
    assert sizes[0] < sizes[2] - 5 * 64 and sizes[1] < sizes[2]
    for gradient in gradients[:2]:
        assert (gradient - gradients[2]).norm() / gradients[2].norm() < 1e-5


@pytest.mark.parametrize("architecture", ["qwen2", "mistral"])
def test_the_gradient_is_the_plain_float64_one(architecture):
    policy = make_policy(architecture)
    samples = make_samples(policy)
    samples = numbered(behind(START, samples), behind(OTHER, samples))
    expected = reference_gradient(policy, samples, "dapo", 1.0)
    gradient = gradient_of(updater_for(policy, loss_type="dapo"), pack(samples, 1000))[0]
    assert (gradient - expected).norm() / expected.norm() < 1e-5


@pytest.mark.parametrize("change", [list, with_turns, rewritten])
def test_padded_rows_have_the_logprobs_of_shared_prefixes(change):
    policy = make_policy()
    samples = change(make_samples(policy))
    [batch] = pack(numbered(behind(START, samples), behind(OTHER, samples)), 2000)
    packed, padded = packed_and_padded(policy, batch)
    assert (packed - padded).abs().max() < 1e-5


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen2"])
def test_the_engine_computes_a_prefix_once(monkeypatch, architecture):
    policy = make_policy(architecture)
    ends = ((5, 6, 7), (5,), (8, 9), (5, 6, 7), (5, 6))
    prompts = [(*start, *end) for end in ends for start in (START, OTHER)] + [(4, 5, 6)]
    requests = [Request(prompt_ids=ids, seeds=(n, 100 + n)) for n, ids in enumerate(prompts)]
    computed: list[int] = []
    hidden = Policy.hidden

    def counted(self, token_ids, *rest):
        computed.extend([token_ids.shape[1]] * (token_ids.shape[1] > 80))  # prompts, not single tokens
        return hidden(self, token_ids, *rest)

    monkeypatch.setattr(Policy, "hidden", counted)
    outputs = {}
    for least in (64, 1 << 30):
        monkeypatch.setattr(shared_prefixes, "MIN_PREFIX", least)
        outputs[least] = collect(NativeEngine(policy), requests, SamplingParams(max_tokens=6))
    # Each prefix once, its ends 5, 5 6, 5 6 7 twice, and 8 9; and the prompt that shares nothing.
    assert computed == [2 * (96 + 1 + 2 + 3 + 3 + 2) + 3, sum(map(len, prompts))]
    shared, alone = outputs[64], outputs[1 << 30]
    assert shared.keys() == alone.keys() and len(shared) == 2 * len(prompts)
    for key, completion in shared.items():
        assert completion.token_ids == alone[key].token_ids
        logprobs = torch.tensor(completion.logprobs)
        assert (logprobs - torch.tensor(alone[key].logprobs)).abs().max() < 1e-5
        assert (logprobs - trainer_logprobs(policy, prompts[key[0]], completion)).abs().max() < 1e-4


def test_adapters_do_not_share_a_prefix():
    policy = make_policy()
    selection = AdapterSelection(("first", "second"))
    torch.manual_seed(2)
    for layer in policy.trunk.layers:
        base = layer.self_attn.v_proj
        factors = {n: (torch.randn(4, base.in_features), torch.randn(base.out_features, 4)) for n in (1, 2)}
        layer.self_attn.v_proj = AdapterLinear(base, factors, selection)
    chosen = (1, 0, 2, 1, 0, 2)
    prompts = [(*START, 5 + number // 3) for number in range(6)]
    requests = [
        Request(prompt_ids=ids, seeds=(7,), adapter=adapter)
        for ids, adapter in zip(prompts, chosen, strict=True)
    ]
    together = collect(NativeEngine(policy), requests, SamplingParams(max_tokens=4))
    for number, request in enumerate(requests):
        [alone] = collect(NativeEngine(policy), [request], SamplingParams(max_tokens=4)).values()
        own = together[number, 0]
        assert own.token_ids == alone.token_ids
        assert torch.allclose(torch.tensor(own.logprobs), torch.tensor(alone.logprobs), atol=1e-5)
    assert len({together[number, 0].logprobs for number in range(3)}) == 3  # the adapters matter
