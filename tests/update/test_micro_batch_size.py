"""Micro-batches by memory: what fits is found, what does not is cut in two, and layers are run again."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import make_policy
from tests.support.update import gradient_of, make_samples, rewritten, train_on, updater_for
from whetstone.errors import UserError
from whetstone.model.reference import Reference
from whetstone.types import Turn
from whetstone.update.micro_batch_size import (
    MAX_TOKENS,
    MIN_TOKENS,
    SHARDED_MEMORY_FRACTION,
    TARGET_TOKENS,
    Measurement,
    MicroBatchSize,
    PlannedSize,
    ShardedSizeSearch,
    SizeBounds,
    SizeSearch,
    find_size,
    layers_without_checkpointing,
    next_size,
    synthetic_batch,
)
from whetstone.update.packing import pack, pack_sequences, slice_sequences


class Device:
    """A device whose memory is a formula, and a gauge of it: `fixed` + tokens x layers x `each`, layers that
    are run again keep a tenth; but at least `floor`, which some other moment of the pass takes. With `square`
    attention is padded: it takes the square of the longest sequence for each.
    """

    def __init__(self, size: float, *, longest=100, layers=10, fixed=100.0, each=1.0, floor=0.0, square=0.0):
        self.policy = make_policy(num_hidden_layers=layers)
        self.size, self.longest, self.fixed, self.each = size, longest, fixed, each
        self.floor, self.square, self.tried, self.taken = floor, square, [], 0

    def takes(self, tokens: int, again: int) -> int:
        layers = len(self.policy.trunk.layers)
        length = min(tokens, self.longest)
        attention = self.square * length**2 * -(-tokens // length)
        return int(max(self.floor, self.fixed + attention + tokens * self.each * (layers - 0.9 * again)))

    def attempt(self, tokens: int) -> None:
        self.tried.append(tokens)
        again = sum(layer.gradient_checkpointing for layer in self.policy.trunk.layers)
        self.taken = self.takes(tokens, again)
        if self.taken > self.size:
            raise torch.OutOfMemoryError("tried to allocate too much")

    def peak_bytes(self, work) -> int:
        work()
        return self.taken

    def free(self) -> float:
        return self.size

    def find(
        self, kind: Any = SizeSearch, *, wanted=1 << 30, allow_checkpointing=True, planned=None
    ) -> MicroBatchSize:
        bounds = SizeBounds(longest=self.longest, total=wanted, uses_padding=self.square > 0)
        probe: Any = self
        search = kind(self.policy, self.attempt, bounds, probe)
        return search.find(allow_checkpointing=allow_checkpointing, planned=planned)


@pytest.mark.parametrize("kind", [SizeSearch, ShardedSizeSearch])
def test_a_large_memory_takes_the_most_that_pays(kind):
    assert Device(1e9).find(kind).tokens == MAX_TOKENS
    # a step of 3,000 tokens needs no more than that
    assert Device(1e9).find(kind, wanted=3000).tokens == 3000


def test_what_fits_is_found_by_two_sizes():
    device = Device(100 + 10 * 12_000)
    budget = device.find()
    assert 0.9 * 12_000 < budget.tokens <= 12_000 and budget.checkpointed_layers is None
    assert len(device.tried) <= 6


@pytest.mark.parametrize(
    ("size", "planned", "expected", "num_tries"),
    [
        (1e9, PlannedSize(tokens=MAX_TOKENS), (MAX_TOKENS, None), 1),  # right
        (1e9, PlannedSize(tokens=9_000), (MAX_TOKENS, None), 2),  # too small: the next takes what is left
        (1e9, PlannedSize(tokens=TARGET_TOKENS, checkpointed_layers=4), (TARGET_TOKENS, 4), 1),
        # Room for 12,000 tokens, of which 92 % are used; 11,500 fit too tightly.
        (10 * 12_000, PlannedSize(tokens=11_500), (11_039, None), 2),
        # As below: five layers are needed, and a layer more saves nine tenths of its tokens.
        (8192 * 6.5, PlannedSize(tokens=8192, checkpointed_layers=4, layer_bytes=7373), (8192, 5), 2),
    ],
    ids=str,
)
def test_a_plan_saves_trials(size, planned, expected, num_tries):
    device = Device(100 + size)
    budget = device.find(planned=planned)
    assert (budget.tokens, budget.checkpointed_layers) == expected
    assert device.tried[0] == MIN_TOKENS and len(device.tried) == 1 + num_tries


def test_a_plan_that_does_not_fit_is_forgotten():
    checkpointed = PlannedSize(tokens=TARGET_TOKENS, checkpointed_layers=1, layer_bytes=7373)
    for planned in (PlannedSize(tokens=MAX_TOKENS), checkpointed):
        device, other = Device(100 + 8192 * 5.0), Device(100 + 8192 * 5.0)
        assert device.find(planned=planned) == other.find()


def test_as_few_layers_as_it_takes_are_run_again():
    """8,192 tokens of 10 layers, and memory for 92 % of 6.5: five layers that keep a tenth leave 5.5."""
    device = Device(100 + 8192 * 6.5)
    budget = device.find()
    assert (budget.tokens, budget.checkpointed_layers) == (TARGET_TOKENS, 5)
    flags = [layer.gradient_checkpointing for layer in device.policy.trunk.layers]
    assert flags == [True] * 5 + [False] * 5
    assert Device(100 + 8192 * 6.5).find(allow_checkpointing=False).tokens < TARGET_TOKENS


def test_small_memory_checkpoints_all_layers():
    budget = Device(100 + 3000).find()
    assert budget.checkpointed_layers == 10 and 2048 <= budget.tokens <= 3000


@pytest.mark.parametrize("kind", [SizeSearch, ShardedSizeSearch])
def test_one_long_sequence_has_layers_run_again_for_it(kind):
    """12,000 tokens that can't be cut: 10,000 would fit without, which is enough for shorter ones."""
    budget = Device(100 + 10 * 10_000, longest=12_000).find(kind)
    assert budget.tokens == 12_000 and 0 < (budget.checkpointed_layers or 0) < 10


def test_ranks_come_near_the_limit_without_out_of_memory():
    """However fixed and growing parts, floors and squares are mixed."""
    small, some = 0, 0
    grid = itertools.product((8e3, 3e4, 9e4), (0.0, 0.3, 0.6), (0.0, 0.5), (0.0, 2e-4), (90, 1500, 6000))
    for size, fixed, floor, square, longest in grid:
        device = Device(
            size, fixed=fixed * size, floor=floor * size, square=square, longest=longest, layers=4
        )
        budget = device.find(ShardedSizeSearch)  # fails where a pass does
        assert len(device.tried) < 40
        taken = device.takes(budget.tokens, budget.checkpointed_layers or 0)
        assert taken <= size
        unit = longest if square else 1
        if budget.tokens < max(longest, TARGET_TOKENS // unit * unit):
            small += 1
            assert budget.checkpointed_layers == 4
            # There is room for a few hundredths more, and with padding for less than one more sequence.
            further = 1.07 if budget.tokens < longest else 1.03 + unit / budget.tokens
            assert taken * further > SHARDED_MEMORY_FRACTION * size, (
                size,
                fixed,
                floor,
                square,
                longest,
                budget,
            )
        else:
            some += 0 < (budget.checkpointed_layers or 0) < 4
    assert small > 20 and some > 20


def test_ranks_keep_what_layers_surely_fit():
    """By hand: 1,000 tokens take 1,000 with no layer run again and so at most 8,000 at 8,000 tokens, where
    all ten run again take 2,000: 600 for each layer that keeps its own, and 2,000 are left for them.
    """
    none = Measurement(tokens=1000, used=1000, available=4000, headroom=4.0)
    every = Measurement(tokens=8000, used=2000, available=4000, headroom=2.0)
    assert layers_without_checkpointing(none, every, SizeBounds(longest=500, total=1 << 30), 10) == 3
    # Where the 1,000 are part of one sequence, attention may make it 64,000: 6,200 for each layer.
    assert layers_without_checkpointing(none, every, SizeBounds(longest=8000, total=1 << 30), 10) == 0
    assert (
        layers_without_checkpointing(
            none, replace(every, available=1000), SizeBounds(longest=500, total=1 << 30), 10
        )
        == 0
    )
    assert (
        layers_without_checkpointing(
            none, replace(every, available=9000), SizeBounds(longest=500, total=1 << 30), 10
        )
        == 10
    )


def test_ranks_take_the_next_size_by_what_is_left():
    trial = Measurement(tokens=1000, used=1.0, available=2.25, headroom=2.25)
    assert next_size(trial, SizeBounds(longest=500, total=1 << 30), 16_384) == 2250
    assert next_size(trial, SizeBounds(longest=500, total=1 << 30), 2000) == 2000
    assert next_size(trial, SizeBounds(longest=500, total=1 << 30, uses_padding=True), 16_384) == 2000
    assert (
        next_size(trial, SizeBounds(longest=500, total=1 << 30, uses_padding=True), 1900) == 1900
    )  # padded: 2,000
    assert next_size(trial, SizeBounds(longest=9000, total=1 << 30), 16_384) == 1500  # the square root
    assert next_size(trial, SizeBounds(longest=1200, total=1 << 30), 16_384) == 1200  # up to it first
    assert next_size(replace(trial, headroom=50.0), SizeBounds(longest=500, total=1 << 30), 16_384) == 4000
    assert next_size(replace(trial, headroom=0.5), SizeBounds(longest=500, total=1 << 30), 16_384) == 1000


def test_a_sequence_that_does_not_fit_is_told():
    device: Any = Device(100 + 500, longest=5000)
    samples = make_samples(make_policy())
    long = replace(samples[0].rollout.completion, token_ids=(3,) * 4996, logprobs=(-1.0,) * 4996)
    group: Any = SimpleNamespace(rollouts=[replace(samples[0].rollout, turns=(Turn(completion=long),))])

    def attempt(batches):
        device.attempt(len(batches[0].token_ids))

    with pytest.raises(UserError, match="5,000 tokens"):
        find_size(device.policy, attempt, [group], device, allow_checkpointing=True)


def test_a_made_up_batch_has_so_many_tokens():
    batch = synthetic_batch(1000, longest=300, prompt=50, vocab_size=97)
    assert 998 <= len(batch.token_ids) <= 1001
    assert batch.num_sequences == 4 and batch.position_ids.max() == 299


def test_a_part_of_a_batch_is_what_packing_it_would_have_made():
    samples = rewritten(make_samples(make_policy()))
    [whole] = pack(samples, 1000)
    order = [int(place) for place in whole.batch_index]
    for first, last in ((0, 2), (1, 5), (4, 6)):
        part, mine = slice_sequences(whole, first, last)
        again = pack_sequences([samples[place] for place in order[first:last]])
        assert part.segments == again.segments
        for name in (
            "token_ids",
            "position_ids",
            "logit_positions",
            "targets",
            "sequence_ids",
            "batch_index",
            "rewards",
            "sequence_mask",
        ):
            assert torch.equal(getattr(part, name), getattr(again, name)), name
        assert torch.equal(whole.targets[mine], part.targets)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_cuts_micro_batches_same_gradient(where):
    exact, before = gradient_of(updater_for(make_policy()), pack(make_samples(make_policy()), 1000))
    updater = updater_for(make_policy())
    updater.micro_batch_size.tokens = 60
    rows = updater.policy.completion_hidden

    def scarce(batch):
        """Fails for more than 40 tokens: at once, or when half of the gradients are there."""
        hidden = rows(batch)
        if len(batch.token_ids) > 40:
            if where == "forward":
                raise torch.OutOfMemoryError("tried to allocate too much")
            hidden.register_hook(_fail)
        return hidden

    updater.policy.completion_hidden = scarce
    gradient, row = gradient_of(updater, pack(make_samples(make_policy()), 1000))
    assert row["oom_splits"] >= 1 and updater.micro_batch_size.tokens <= 30
    assert (gradient - exact).norm() / exact.norm() < 1e-6
    assert row["loss"] == pytest.approx(before["loss"], rel=1e-5)
    assert row["entropy"] == pytest.approx(before["entropy"], rel=1e-5)


def _fail(gradient):
    raise torch.OutOfMemoryError("tried to allocate too much")


@pytest.mark.parametrize(
    "what",
    [{"kl_reference": "base"}, {"kl_reference": "rollout"}, {"kl_estimator": "full"}, {"advantage": "gae"}],
    ids=["reference", "old logprobs", "whole KL", "critic"],
)
def test_out_of_memory_before_the_update_cuts_micro_batches(what):
    flat = {"beta": 0.1, "critic_warmup_steps": 0, **what}
    made = []
    for scarce in (False, True):
        policy = make_policy()
        other = make_policy(seed=1)  # else the KL and its gradient are 0
        reference = (
            None
            if what.get("kl_reference") == "rollout"
            else Reference.from_policy(policy, other, moving=False)
        )
        updater = updater_for(policy, reference, **flat)
        updater.micro_batch_size.tokens = 60
        rows = policy.completion_hidden

        def only_few(batch, rows=rows):
            if not torch.is_grad_enabled() and len(batch.token_ids) > 40:
                raise torch.OutOfMemoryError("tried to allocate too much")
            return rows(batch)

        if scarce:
            policy.completion_hidden = only_few
        before = [parameter.clone() for parameter in policy.parameters()]
        made.append(
            (*gradient_of(updater, pack(make_samples(make_policy()), 1000)), updater.micro_batch_size.tokens)
        )
        for was, parameter in zip(before, policy.parameters(), strict=True):  # the reference went back
            assert torch.equal(was, parameter)
    (exact, plain, _), (gradient, row, tokens) = made
    assert (plain["oom_splits"], row["oom_splits"], tokens) == (0, 1, 30)
    assert (gradient - exact).norm() / exact.norm() < 1e-6
    for name in ("loss", "kl", "entropy"):
        assert row[name] == pytest.approx(plain[name], rel=1e-5, abs=1e-7), name


def test_sequence_beyond_memory_ends_the_run_with_a_remedy():
    updater = updater_for(make_policy())
    updater.policy.completion_hidden = lambda batch: _fail(None)
    with pytest.raises(UserError, match="micro_batch_tokens"):
        train_on(updater, [pack(make_samples(make_policy()), 1000)])


def test_a_budget_is_part_of_the_checkpoint():
    updater = updater_for(make_policy())
    updater.micro_batch_size.tokens, updater.micro_batch_size.checkpointed_layers = 1234, 1
    other = updater_for(make_policy())
    other.load_state_scalars(updater.state_scalars())
    assert other.micro_batch_tokens([]) == 1234
    assert [layer.gradient_checkpointing for layer in other.policy.trunk.layers][:2] == [True, False]
    elsewhere = updater_for(make_policy())
    elsewhere.load_state_scalars({**updater.state_scalars(), "layout": "1x2x1"})  # half of the memory a rank
    assert elsewhere.micro_batch_size.tokens == 0
    chosen = updater_for(make_policy(), micro_batch_tokens=99)
    chosen.load_state_scalars(updater.state_scalars())
    assert chosen.micro_batch_tokens([]) == 99
