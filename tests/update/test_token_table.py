"""What is kept of each token, beside a plain pass over each sequence."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.conftest import make_policy
from tests.support.update import ADVANTAGES, make_samples, sequence_logprobs, train_on, updater_for
from whetstone.model.reference import Reference
from whetstone.update.packing import pack
from whetstone.update.token_table import NUMBERS, RULES


def table_of(policy, samples, **settings):
    reference = Reference.from_policy(policy, policy, moving=False) if settings.get("beta") else None
    updater = updater_for(policy, reference, **settings)
    train_on(updater, [pack(samples, 24)])  # several micro-batches
    return updater.accumulator.tokens.rows(range(len(samples)))


def column(rows, name):
    return rows.numbers[NUMBERS.index(name)]


def rule(rows, name):
    return (rows.rules >> RULES.index(name)) & 1


def test_every_token_has_the_numbers_of_a_plain_pass():
    policy = make_policy()
    samples = make_samples(policy, sampler_shift=0.25)
    expected = {}
    for sample in samples:
        ids = [*sample.rollout.prompt_ids, *sample.rollout.completion.token_ids]
        expected[sample.index] = sequence_logprobs(policy, ids, len(sample.rollout.prompt_ids)).detach()
    table = table_of(policy, samples)
    assert sorted(table) == list(range(len(samples)))
    for index, rows in table.items():
        logprobs = expected[index].numpy()
        assert rows.numbers.shape == (len(NUMBERS), len(logprobs))
        np.testing.assert_allclose(column(rows, "logprob"), logprobs, atol=1e-5)
        np.testing.assert_allclose(column(rows, "old_logprob"), logprobs, atol=1e-5)
        np.testing.assert_allclose(column(rows, "sampler_logprob"), logprobs + 0.25, atol=1e-5)
        np.testing.assert_allclose(column(rows, "advantage"), ADVANTAGES[index])
        assert (column(rows, "weight") == 1).all() and not rows.rules.any()
        assert np.isnan(column(rows, "kl")).all() and np.isnan(column(rows, "value")).all()
        assert (column(rows, "entropy") > 0).all() and (column(rows, "entropy") < math.log(97.1)).all()


def test_masks_and_bounds_have_their_bits():
    policy = make_policy()
    samples = make_samples(policy, sampler_shift=-1.0)  # weights exp(1): above their bound of 2
    samples[0] = replace(samples[0], keep=False)
    table = table_of(
        policy, samples, importance_correction="token_truncate", importance_correction_max=2.0,
        top_entropy_quantile=0.5,
    )  # fmt: skip
    assert rule(table[0], "truncated_completion").all() and (column(table[0], "weight") == 0).all()
    assert all(rule(rows, "importance_bound").all() for rows in table.values())
    low = np.concatenate([rule(table[n], "low_entropy") for n in range(1, len(samples))])
    entropy = np.concatenate([column(table[n], "entropy") for n in range(1, len(samples))])
    weight = np.concatenate([column(table[n], "weight") for n in range(1, len(samples))])
    assert 0.4 < low.mean() < 0.6 and entropy[low == 1].max() < entropy[low == 0].min()
    np.testing.assert_allclose(weight, 2.0 * (1 - low))


@pytest.mark.parametrize("shift", [-0.5, 0.0])
def test_token_table_has_clipped_bits_and_kl_of_the_loss(shift):
    """The second of two iterations is recorded: the policy has moved by then."""
    policy = make_policy()
    samples = make_samples(policy, sampler_shift=shift)
    torch.manual_seed(0)
    table = table_of(policy, samples, num_iterations=2, beta=0.1, learning_rate=0.03)
    ratio = np.concatenate([np.exp(column(r, "logprob") - column(r, "old_logprob")) for r in table.values()])
    sign = np.concatenate([np.sign(column(rows, "advantage")) for rows in table.values()])
    clipped = np.concatenate([rule(rows, "clipped") for rows in table.values()])
    expected = ((ratio > 1.2) & (sign > 0)) | ((ratio < 0.8) & (sign < 0))
    assert 0 < clipped.sum() < len(clipped) and (clipped == expected).all()
    kl = np.concatenate([column(rows, "kl") for rows in table.values()])
    difference = -np.log(ratio)  # the reference is the policy before the first update, as is the old one
    np.testing.assert_allclose(kl, ratio * (np.exp(difference) - difference - 1), rtol=1e-4, atol=1e-5)
