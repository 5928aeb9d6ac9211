"""Completions of advantage 0 are left out of the update: the same gradient with fewer passes."""

from dataclasses import replace

import pytest
import torch

from tests.conftest import make_policy
from tests.support.update import flat_gradient, make_samples
from whetstone.config import build, make_plan
from whetstone.config.losses import LOSSES
from whetstone.types import Episode, Finish, Group, Problem
from whetstone.update.packing import make_samples as samples_of
from whetstone.update.packing import pack_minibatches
from whetstone.update.updater import Updater

REWARDS = ([0.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.3, 0.9, 0.9])
SETTINGS = {"num_generations": 3, "prompts_per_step": 4, "max_steps": 4, "max_completion_length": 16}


def make_groups(policy, rewards=REWARDS):
    """Groups of three completions with these rewards."""
    base = make_samples(policy, sampler_shift=0.05)[:3]  # they share a prompt
    groups = []
    for number, row in enumerate(rewards):
        rollouts = [
            replace(
                sample.rollout,
                prompt_ids=(*sample.rollout.prompt_ids, 5 + number),
                score=replace(sample.rollout.score, reward=reward),
            )
            for sample, reward in zip(base, row, strict=True)
        ]
        problem = Problem(id=str(number), task="none", messages=(), answer="")
        groups.append(Group(problem=problem, rollouts=tuple(rollouts)))
    return groups


def step(policy, groups, **flat):
    """Gradients of the minibatches of a batch, their metrics, and the tokens that were run."""
    config = build({**SETTINGS, **flat})
    updater = Updater(policy, config, make_plan(config, num_problems=100), None)
    gradients, num_tokens = [], []
    updater.optimizer.step = lambda norm: gradients.append(flat_gradient(policy))
    forward = policy.completion_hidden
    policy.completion_hidden = lambda batch: (num_tokens.append(len(batch.token_ids)), forward(batch))[1]
    metrics = updater.update(updater.prepare(updater.pack(groups, seed=0)), seed=0)
    policy.completion_hidden = forward
    policy.model.zero_grad()
    return gradients, metrics, sum(num_tokens)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("loss_type", [name for name, loss in LOSSES.items() if not loss.supervised])
def test_the_gradient_is_that_of_the_whole_batch(loss_type, scale):
    policy = make_policy()
    groups = make_groups(policy)
    settings = {"loss_type": loss_type, "scale_rewards": scale}
    [gradient], metrics, num_tokens = step(policy, groups, **settings)
    [whole], whole_metrics, all_tokens = step(policy, groups, skip_zero_advantages=False, **settings)
    assert whole.norm() > 0
    assert (gradient - whole).norm() / whole.norm() < 1e-5
    assert metrics["loss"] == pytest.approx(whole_metrics["loss"], abs=1e-6)
    assert num_tokens == all_tokens / 2  # two groups of four, of equal lengths


@pytest.mark.parametrize("settings", [{"advantage": "rloo"}, {"importance_correction": "sequence_mask"}])
def test_several_minibatches_and_iterations(settings):
    policy = make_policy()
    groups = make_groups(policy)
    settings = {"steps_per_generation": 2, "prompts_per_step": 2, "num_iterations": 2, **settings}
    gradients, _, num_tokens = step(policy, groups, **settings)
    whole, _, all_tokens = step(policy, groups, skip_zero_advantages=False, **settings)
    assert len(gradients) == len(whole) == 4
    for gradient, expected in zip(gradients, whole, strict=True):
        assert (gradient - expected).norm() / expected.norm() < 1e-5
    assert num_tokens < all_tokens * 0.75


def test_equal_rewards_give_all_metrics_without_gradient():
    policy = make_policy()
    groups = make_groups(policy, rewards=[[1.0, 1.0, 1.0]] * 4)
    [gradient], metrics, num_tokens = step(policy, groups)
    _, whole_metrics, all_tokens = step(policy, groups, skip_zero_advantages=False)
    assert gradient.norm() == 0 and metrics["entropy"] > 0
    assert set(metrics) == set(whole_metrics)
    assert 0 < num_tokens < all_tokens / 4


@pytest.mark.parametrize(
    "settings",
    [
        {"entropy_coef": 0.01},
        {"entropy_target": 0.5},
        {"top_entropy_quantile": 0.5},
        {"advantage": "reinforce_pp"},
        {"skip_zero_advantages": False},
    ],
)
def test_nothing_is_skipped_where_more_than_the_advantage_acts(settings):
    policy = make_policy()
    _, _, num_tokens = step(policy, make_groups(policy), **settings)
    batches = pack_minibatches(
        make_groups(policy), build({"skip_zero_advantages": False}), 1, 0, max_tokens=8192
    )
    passes = 2 if "top_entropy_quantile" in settings else 1  # one for the quantile
    assert num_tokens == passes * sum(len(batch.token_ids) for batch in batches[0])


@pytest.mark.parametrize("settings", [{"beta": 0.01}, {"advantage": "gae"}, {"loss_type": "own.py:loss"}])
def test_settings_that_need_every_completion(settings):
    assert build({}).skips_zero_advantages
    assert not build(settings).skips_zero_advantages


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
def test_ranks_share_what_is_trained_and_what_is_skipped(num_ranks):
    groups = make_groups(make_policy())
    parts = [
        pack_minibatches(groups, build(SETTINGS), 1, 0, max_tokens=20, rank=rank, num_ranks=num_ranks)[0]
        for rank in range(num_ranks)
    ]
    assert len({sum(not batch.is_skipped for batch in part) for part in parts}) == 1
    for skipped, expected in ((False, [0, 1, 2, 9, 10, 11]), (True, [3, 4, 5, 6, 7, 8])):
        batches = [batch for part in parts for batch in part if batch.is_skipped == skipped]
        assert sorted(torch.cat([batch.batch_index for batch in batches]).tolist()) == expected


def test_equal_episodes_are_skipped_without_credit_by_turn():
    group = make_groups(make_policy(), rewards=[[1.0, 1.0, 1.0]])[0]
    first = group.rollouts[0]
    two_turns = replace(
        first,
        turns=first.turns * 2,
        episode=Episode(finish=Finish.STOP, messages=(), rewards=(0.25, 0.0)),
    )
    assert two_turns.turn_rewards == (0.25, 0.75)
    failed = replace(two_turns, episode=replace(two_turns.episode, error="it raised"))
    assert failed.turn_rewards == (0.0, 1.0)
    groups = [replace(group, rollouts=(two_turns, failed, failed)), group]
    for credit, expected in (("episode", [True] * 6), ("turn", [False] * 3 + [True] * 3)):
        config = build({"num_generations": 3, "turn_credit": credit})
        assert [sample.skip for sample in samples_of(groups, config)] == expected
