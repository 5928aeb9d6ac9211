"""What is fixed before the first update: KL against whom and where, values; coefficients that adapt."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conftest import make_policy
from tests.support.update import ADVANTAGES, make_samples, train_on, with_turns
from whetstone.config import build, ineffective_settings, make_plan
from whetstone.config.sections import LossConfig
from whetstone.errors import UserError
from whetstone.model.reference import Reference
from whetstone.update.coefficients import Coefficients
from whetstone.update.packing import pack
from whetstone.update.updater import Updater

BASE = {
    "max_steps": 12,
    "max_completion_length": 16,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "num_generations": 3,
    "prompts_per_step": 2,
}


def make(policy=None, **changes) -> Any:
    policy = policy or make_policy()
    config = build({**BASE, **changes})
    loss = config.loss
    reference = None
    if loss.beta > 0 and loss.kl_reference != "rollout":
        reference = Reference.from_policy(policy, policy, moving=loss.kl_reference == "moving")
    return Updater(policy, config, make_plan(config, num_problems=100), reference)


def samples_of(policy):
    """Six completions; the first three and the last three are the two groups."""
    return make_samples(policy)


def prepare(updater, budget=1000) -> Any:
    parts = [pack(samples_of(make_policy()), budget)]
    return updater.experience_builder.build(parts, num_generations=3, beta=updater.coefficients.beta)[0]


def by_place(part, values):
    """Per-token values of experiences -> the first value of each completion, in the order of the groups."""
    found = {}
    for experience, value in zip(part, values, strict=True):
        for number, place in enumerate(experience.batch.batch_index.tolist()):
            found[place] = value[experience.batch.sequence_ids == number][0].item()
    return [found[place] for place in sorted(found)]


def test_advantages_are_taken_within_groups_whatever_the_packing():
    rewards = torch.tensor([[1.0, -0.5, 0.7], [-1.2, 0.3, -0.3]])
    expected = (rewards - rewards.mean(1, keepdim=True)).flatten().tolist()
    for budget in (1000, 25):
        part = prepare(make(scale_rewards="none"), budget)
        assert by_place(part, [e.advantages for e in part]) == pytest.approx(expected, abs=1e-6)


def test_kl_in_the_reward_is_taken_off_before_the_advantage():
    updater = make(beta=0.5, kl_in="reward", kl_estimator="k1", scale_rewards="none")
    with torch.no_grad():  # the policy moves away from its reference
        for parameter in updater.policy.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    part = prepare(updater)
    rewards = []
    for e in part:
        kl = e.old_logprobs - e.reference_logprobs
        assert kl.abs().mean() > 1e-3
        totals = torch.zeros(e.batch.num_sequences).index_add(0, e.batch.sequence_ids, kl)
        rewards += list(
            zip(e.batch.batch_index.tolist(), (e.batch.rewards[:, 0] - 0.5 * totals).tolist(), strict=True)
        )
    table = torch.tensor([reward for _, reward in sorted(rewards)]).view(2, 3)
    expected = (table - table.mean(1, keepdim=True)).flatten().tolist()
    assert by_place(part, [e.advantages for e in part]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("advantage", ["group", "gae"])
def test_kl_in_the_reward_is_reported_and_moves_beta(advantage):
    """The mean of the estimator per token; a target above it lowers beta, one below it raises it."""
    for target, direction in ((1e-9, 1), (1e3, -1)):
        updater = make(beta=0.5, kl_in="reward", kl_estimator="k3", target_kl=target, advantage=advantage)
        with torch.no_grad():
            for parameter in updater.policy.parameters():
                parameter.add_(
                    0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
                )
        part = prepare(updater)
        gaps = torch.cat([e.reference_logprobs - e.old_logprobs for e in part]).double()
        expected = (gaps.exp() - gaps - 1).mean().item()
        assert expected > 1e-4
        assert updater.optimizer_step(part)["kl"] == pytest.approx(expected, rel=1e-4)
        assert updater.coefficients.beta == pytest.approx(0.5 * (1 + 0.1 * direction), rel=1e-3)


@pytest.mark.parametrize("max_turns", [2, 8])
def test_more_turns_than_max_turns_are_credited_all_the_same(max_turns):
    """`max_turns` does not bind a rollout_func: these have up to three."""
    updater = make(turn_credit="turn", max_turns=max_turns, scale_rewards="none")
    samples = [replace(sample, by_turn=True) for sample in with_turns(samples_of(make_policy()))]
    assert max(len(sample.rollout.turns) for sample in samples) == 3
    [part] = updater.experience_builder.build([pack(samples, 1000)], num_generations=3, beta=0.0)
    # All is earned at the end, so every turn has its episode's reward, beside those that have such a turn.
    turns = [len(sample.rollout.turns) for sample in samples]
    for e in part:
        for place, turn, found in zip(
            e.batch.batch_index[e.batch.sequence_ids].tolist(),
            e.batch.turn_ids.tolist(),
            e.advantages,
            strict=True,
        ):
            group = range(place // 3 * 3, place // 3 * 3 + 3)
            peers = [ADVANTAGES[n] for n in group if turns[n] > turn]
            assert found.item() == pytest.approx(ADVANTAGES[place] - sum(peers) / len(peers), abs=1e-6)


def test_local_kl_is_zero_at_the_first_update_and_not_later():
    updater = make(beta=0.1, kl_reference="rollout", num_iterations=3, kl_estimator="k3")
    part = prepare(updater)
    kl = [updater.optimizer_step(part)["kl"] for _ in range(3)]
    assert kl[0] == pytest.approx(0, abs=1e-6) and kl[1] > 1e-5 and kl[2] > 1e-5


def test_local_kl_with_one_update_is_said_to_have_no_effect():
    config = build({**BASE, "beta": 0.1, "kl_reference": "rollout"})
    (note,) = ineffective_settings(config, make_plan(config, num_problems=10))
    assert "num_iterations" in note
    several = build({**BASE, "beta": 0.1, "kl_reference": "rollout", "num_iterations": 2})
    assert ineffective_settings(several, make_plan(several, num_problems=10)) == []


def test_local_kl_restrains_the_update():
    def drift(beta):
        policy = make_policy()
        updater = make(
            policy, beta=beta, kl_reference="rollout", num_iterations=4, kl_estimator="k2", epsilon=10.0
        )
        train_on(updater, [pack(samples_of(make_policy()), 1000)])
        before = make_policy().logprobs(batch := pack(samples_of(make_policy()), 1000)[0], 1.0)
        return (policy.logprobs(batch, 1.0) - before).abs().mean().item()

    assert drift(5.0) < 0.8 * drift(1e-9)


def test_a_moving_reference_follows_by_its_share():
    policy = make_policy()
    updater = make(
        policy, beta=0.1, kl_reference="moving", ref_model_sync_steps=2, ref_model_mixup_alpha=0.25
    )
    first = [parameter.detach().clone() for parameter in policy.parameters()]
    batches = pack(samples_of(make_policy()), 1000)
    train_on(updater, [batches])
    assert all(torch.equal(a, b) for a, b in zip(first, updater.reference.weights, strict=True))
    train_on(updater, [batches])
    for start, now, reference in zip(first, policy.parameters(), updater.reference.weights, strict=True):
        assert torch.allclose(reference, 0.75 * start + 0.25 * now, atol=1e-6)


def test_the_reference_pass_leaves_the_policy_as_it_was():
    policy = make_policy()
    reference = Reference.from_policy(policy, policy, moving=False)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    with reference.swapped_in():
        assert all(
            torch.equal(p, b / 1.1) or torch.allclose(p, b / 1.1)
            for p, b in zip(policy.parameters(), before, strict=True)
        )
    assert all(torch.equal(p, b) for p, b in zip(policy.parameters(), before, strict=True))


def test_a_moving_reference_with_lora_copies_the_adapter_alone():
    from whetstone.config.sections import ModelConfig
    from whetstone.model.lora import add_lora
    from whetstone.model.policy import Policy

    plain = make_policy()
    policy = Policy(
        add_lora(plain.model, ModelConfig(use_peft=True, lora_r=2), None), plain.tokenizer, plain.device
    )
    reference: Any = Reference.from_policy(policy, policy, moving=True)
    copied = sum(weight.numel() for weight in reference.weights)
    assert (
        copied
        == sum(p.numel() for p in policy.parameters())
        < 0.3 * sum(p.numel() for p in policy.model.parameters())
    )


def test_full_kl_is_the_divergence_over_the_vocabulary():
    updater = make(beta=0.1, kl_estimator="full", learning_rate=0.0)
    with torch.no_grad():
        for parameter in updater.policy.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    row = train_on(updater, [pack(samples_of(make_policy()), 1000)])
    (batch,) = pack(samples_of(make_policy()), 1000)
    now = updater.policy.head(updater.policy.completion_hidden(batch)).log_softmax(-1)
    before = (first := make_policy()).head(first.completion_hidden(batch)).log_softmax(-1)
    expected = (now.exp() * (now - before)).sum(-1).mean().item()
    assert expected > 1e-4 and row["kl"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", ["head", "model"])
def test_a_critic_learns_what_completions_earn(kind):
    changes = {"advantage": "gae", "critic": kind, "critic_learning_rate": 3e-2, "value_clip": None}
    changes |= {"num_generations": 1, "prompts_per_step": 6, "learning_rate": 0.0, "gae_lambda": 1.0}
    updater = make(**changes)
    batches = pack(samples_of(make_policy()), 30)
    rows = [train_on(updater, [batches]) for _ in range(12)]
    errors = [row["value_loss"] for row in rows]
    # at first it expects nothing: half the mean square of the rewards, by tokens
    tokens, rewards = torch.tensor([7, 3, 12, 1, 5, 8.0]), torch.tensor([1.0, -0.5, 0.7, -1.2, 0.3, -0.3])
    assert errors[0] == pytest.approx((tokens * rewards.square() / 2).sum().item() / 36, rel=1e-4)
    assert errors[-1] < 0.5 * errors[0]
    assert rows[0]["explained_variance"] == pytest.approx(0, abs=1e-6)  # it said the same of all
    assert rows[-1]["explained_variance"] > 0.3


def test_a_single_sample_per_prompt_needs_a_critic_or_the_batch():
    config = build({**BASE, "num_generations": 1})
    with pytest.raises(UserError, match=r"gae.*reinforce_pp"):
        make_plan(config, num_problems=10)
    make_plan(build({**BASE, "num_generations": 1, "advantage": "gae"}), num_problems=10)


def test_warm_up_trains_the_critic_alone():
    updater = make(advantage="gae", critic_warmup_steps=2, critic_learning_rate=1e-2, value_coef=0.0)
    before = [parameter.detach().clone() for parameter in updater.policy.parameters()]
    batches = pack(samples_of(make_policy()), 1000)
    for _ in range(2):
        train_on(updater, [batches])
        assert all(torch.equal(a, b) for a, b in zip(before, updater.policy.parameters(), strict=True))
    assert updater.critic.head.weight.abs().sum() > 0
    train_on(updater, [batches])
    assert any(not torch.equal(a, b) for a, b in zip(before, updater.policy.parameters(), strict=True))


def test_value_coef_is_the_share_of_the_trunks_gradient():
    def trunk_gradient(share):
        updater = make(advantage="gae", value_coef=share, learning_rate=0.0)
        with torch.no_grad():
            updater.critic.head.weight.fill_(0.1)
        caught = {}
        updater.optimizer.step = lambda norm: caught.update(
            g=torch.cat([p.grad.flatten() for p in updater.policy.parameters()])
        )
        train_on(updater, [pack(samples_of(make_policy()), 1000)])
        return caught["g"]

    without, half, whole = (trunk_gradient(share) for share in (0.0, 0.5, 1.0))
    assert torch.allclose(half - without, (whole - without) / 2, atol=1e-6)
    assert (whole - without).norm() > 1e-4


def test_beta_follows_the_kl_and_the_bonus_the_entropy():
    coefficients = Coefficients(LossConfig(beta=0.1, target_kl=0.02, entropy_target=1.0, entropy_coef=0.01))
    coefficients.adapt({"kl": 0.03, "entropy": 0.8})  # half as much again as wanted; too decided
    assert coefficients.beta == pytest.approx(0.1 * 1.05)
    assert coefficients.entropy == pytest.approx(0.015)
    coefficients.adapt({"kl": 0.2, "entropy": 1.4})  # far too much: bounded; entropy above its target
    assert coefficients.beta == pytest.approx(0.105 * 1.1)
    assert coefficients.entropy == 0.0 and coefficients.metrics()["entropy_coef"] == pytest.approx(0.01)
    again = Coefficients(LossConfig(beta=0.1, target_kl=0.02, entropy_target=1.0, entropy_coef=0.01))
    again.load_state(coefficients.state())
    assert again.beta == coefficients.beta and again.entropy == coefficients.entropy


def test_coefficients_do_not_adapt_to_a_step_that_was_skipped():
    """`min(1.0, nan)` is 1.0, and `nan <= target` is false."""
    updater = make(beta=0.1, target_kl=0.02, entropy_target=100.0, entropy_coef=0.01, kl_in="reward")
    part = prepare(updater)
    broken = [replace(e, advantages=e.advantages * math.nan) for e in part]
    before = updater.coefficients.state()
    assert math.isnan(updater.optimizer_step(broken)["loss"])
    assert updater.coefficients.state() == before
    updater.coefficients.adapt({"kl": math.nan, "entropy": math.nan})
    assert updater.coefficients.state() == before
    updater.optimizer_step(part)
    assert updater.coefficients.state() != before


def test_a_fixed_beta_can_be_changed_on_resume():
    fixed = Coefficients(LossConfig(beta=0.5))
    fixed.load_state(replace_beta(Coefficients(LossConfig(beta=0.1)).state()))
    assert fixed.beta == 0.5


def replace_beta(state):
    return {**state, "beta": 0.1}
