"""Micro-batches by memory: what fits is found, what does not is cut in two, and layers are run again."""

import pytest
import torch

from tests.conftest import make_policy
from tests.unit.test_update import gradient_of, make_samples, updater_for
from whetstone.batch import _lay_end_to_end, cut_out, pack
from whetstone.budget import ENOUGH, MOST, Finder, made_up
from whetstone.errors import UserError


class Memory(Finder):
    """A finder on a device whose memory is a formula: `fixed` + tokens x layers x `each`, layers that are run
    again keep a tenth.
    """

    def __init__(self, size: float, *, longest=100, wanted=1 << 30, layers=10, fixed=100, each=1.0):
        self.policy = make_policy(num_hidden_layers=layers)
        super().__init__(self.policy, lambda tokens: None, longest=longest, wanted=wanted)
        self.size, self.fixed, self.each, self.tried = size, fixed, each, []

    def _peak(self, tokens: int) -> int | None:
        self.tried.append(tokens)
        again = sum(layer.gradient_checkpointing for layer in self.policy.trunk.layers)
        taken = self.fixed + tokens * self.each * (len(self.policy.trunk.layers) - 0.9 * again)
        return None if taken > self.size else int(taken)


@pytest.fixture(autouse=True)
def free(monkeypatch):
    def of(finder: Memory):
        monkeypatch.setattr("whetstone.budget.free_memory", lambda device: finder.size)
        return finder

    return of


def test_a_large_memory_takes_the_most_that_pays(free):
    assert free(Memory(1e9)).find(may_run_again=True).tokens == MOST
    # a step of 3,000 tokens needs no more than that
    assert free(Memory(1e9, wanted=3000)).find(may_run_again=True).tokens == 3000


def test_what_fits_is_found_by_two_sizes(free):
    finder = free(Memory(100 + 10 * 12_000))
    budget = finder.find(may_run_again=True)
    assert 0.9 * 12_000 < budget.tokens <= 12_000 and budget.layers_run_again is None
    assert len(finder.tried) <= 6


def test_as_few_layers_as_it_takes_are_run_again(free):
    """8,192 tokens of 10 layers, and memory for 92 % of 6.5: five layers that keep a tenth leave 5.5."""
    finder = free(Memory(100 + 8192 * 6.5))
    budget = finder.find(may_run_again=True)
    assert (budget.tokens, budget.layers_run_again) == (ENOUGH, 5)
    flags = [layer.gradient_checkpointing for layer in finder.policy.trunk.layers]
    assert flags == [True] * 5 + [False] * 5
    assert free(Memory(100 + 8192 * 6.5)).find(may_run_again=False).tokens < ENOUGH


def test_a_small_memory_runs_all_layers_again_and_takes_what_fits(free):
    budget = free(Memory(100 + 3000)).find(may_run_again=True)
    assert budget.layers_run_again == 10 and 2048 <= budget.tokens <= 3000


def test_a_sequence_that_does_not_fit_is_told(free):
    with pytest.raises(UserError, match="One sequence of 5,000 tokens"):
        free(Memory(100 + 1000, longest=5000)).find(may_run_again=True)


def test_a_made_up_batch_has_so_many_tokens():
    batch = made_up(1000, longest=300, prompt=50, vocabulary=97)
    assert 998 <= len(batch.token_ids) <= 1001
    assert batch.num_sequences == 4 and batch.position_ids.max() == 299


def test_a_part_of_a_batch_is_what_packing_it_would_have_made():
    samples = make_samples(make_policy())
    [whole] = pack(samples, 1000)
    order = [int(place) for place in whole.places]
    for first, last in ((0, 2), (1, 5), (4, 6)):
        part, mine = cut_out(whole, first, last)
        again = _lay_end_to_end([samples[place] for place in order[first:last]])
        assert part.segments == again.segments
        for name in ("token_ids", "position_ids", "rows", "targets", "sequence", "places", "rewards", "keep"):
            assert torch.equal(getattr(part, name), getattr(again, name)), name
        assert torch.equal(whole.targets[mine], part.targets)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_memory_that_runs_out_cuts_micro_batches_and_changes_no_gradient(where):
    exact, before = gradient_of(updater_for(make_policy()), pack(make_samples(make_policy()), 1000))
    updater = updater_for(make_policy())
    updater.budget.tokens = 60
    rows = updater.policy.rows

    def scarce(batch):
        """Fails for more than 40 tokens: at once, or when half of the gradients are there."""
        hidden = rows(batch)
        if len(batch.token_ids) > 40:
            if where == "forward":
                raise torch.OutOfMemoryError("tried to allocate too much")
            hidden.register_hook(_fail)
        return hidden

    updater.policy.rows = scarce
    gradient, row = gradient_of(updater, pack(make_samples(make_policy()), 1000))
    assert row["oom_splits"] >= 1 and updater.budget.tokens <= 30
    assert (gradient - exact).norm() / exact.norm() < 1e-6
    assert row["loss"] == pytest.approx(before["loss"], rel=1e-5)
    assert row["entropy"] == pytest.approx(before["entropy"], rel=1e-5)


def _fail(gradient):
    raise torch.OutOfMemoryError("tried to allocate too much")


def test_a_single_sequence_that_does_not_fit_ends_the_run_with_a_remedy():
    updater = updater_for(make_policy())
    updater.policy.rows = lambda batch: _fail(None)
    with pytest.raises(UserError, match="micro_batch_tokens lower"):
        updater.step([pack(make_samples(make_policy()), 1000)], seed=0)


def test_a_budget_is_part_of_the_checkpoint():
    updater = updater_for(make_policy())
    updater.budget.tokens, updater.budget.layers_run_again = 1234, 1
    other = updater_for(make_policy())
    other.load_numbers(updater.numbers())
    assert other.micro_batch_tokens([]) == 1234
    assert [layer.gradient_checkpointing for layer in other.policy.trunk.layers][:2] == [True, False]
    chosen = updater_for(make_policy(), micro_batch_tokens=99)
    chosen.load_numbers(updater.numbers())
    assert chosen.micro_batch_tokens([]) == 99
