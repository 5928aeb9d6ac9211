"""Gradients of a whole optimizer step against a plain float64 reference: the transformers model on one padded
batch, no packing, no shared prompts, every formula written out once more.

The policy has moved twice: W0 is the reference of the KL, W1 was there before the first update, W2 is now. So
ratios differ from 1, clips bite and the KL is not 0.
"""

import copy
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

from tests.conftest import make_policy
from tests.support.update import SIZES, all_ids, make_samples, predicting_positions, rewritten, with_turns
from whetstone.config import build, make_plan
from whetstone.config.losses import LOSSES
from whetstone.config.sections import ModelConfig
from whetstone.model.lora import add_lora
from whetstone.model.policy import Policy
from whetstone.model.reference import Reference
from whetstone.types import Episode, Finish
from whetstone.update.packing import pack
from whetstone.update.updater import Updater

TEMPERATURE = 0.8
GROUP = 3
FLAT: dict[str, Any] = {
    "max_steps": 4,
    "num_generations": GROUP,
    "prompts_per_step": 2,
    "max_completion_length": 16,
    "temperature": TEMPERATURE,
    "beta": 0.05,
    "epsilon": 0.1,
    "epsilon_high": 0.15,
}
LENGTHS = torch.tensor([completion for _, completion in SIZES])


def settings_for(loss_type):
    own = {"cispo": {"epsilon_high": 1.1}, "gspo": {"epsilon": 0.01, "epsilon_high": 0.01}}
    return {"loss_type": loss_type, **own.get(loss_type, {})}


def lora_policy():
    plain = make_policy()
    model = add_lora(plain.model, ModelConfig(use_peft=True, lora_r=4), None)
    return Policy(model, plain.tokenizer, plain.device)


@torch.no_grad()
def shake(policy, seed, scale=0.01):
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def double(policy) -> Any:
    """The policy's model in float64 with transformers' own attention."""
    model = copy.deepcopy(policy.model).double()
    lm = model.get_base_model() if policy.is_lora else model
    lm.set_attn_implementation("eager")
    return model


# ---- ours ------------------------------------------------------------------------------------------------


def our_step(policy, samples, critic_shift=0.0, **changes):
    """(float64 models W0, W1, W2; critics at W1 and W2; gradients of both; metrics; configuration)"""
    config = build({**FLAT, **changes})
    reference = Reference.from_policy(policy, policy, moving=False) if config.loss.beta else None
    updater: Any = Updater(policy, config, make_plan(config, num_problems=10), reference)
    critics = []
    if updater.critic is not None:
        with torch.no_grad():  # a critic that expects something
            generator = torch.Generator().manual_seed(7)
            updater.critic.head.weight.add_(0.05 * torch.randn(1, 32, generator=generator))
        critics.append(double_critic(updater.critic))
    models = [double(policy)]
    shake(policy, 1)
    models.append(double(policy))
    batches = pack(samples, max_tokens=30)
    assert len(batches) > 1
    (part,) = updater.experience_builder.build([batches], num_generations=GROUP, beta=config.loss.beta)
    with torch.no_grad():
        part = [replace(e, old_logprobs=policy.logprobs(e.batch, TEMPERATURE)) for e in part]
    shake(policy, 2)
    models.append(double(policy))
    if updater.critic is not None:
        with torch.no_grad():
            updater.critic.head.bias.add_(critic_shift)
        critics.append(double_critic(updater.critic))
    gradients: dict[str, Any] = {}
    updater.optimizer.step = lambda norm: gradients.update(policy=flat(policy.parameters()))
    if updater.critic is not None:
        updater.critic_optimizer.step = lambda norm: gradients.update(
            critic=flat(updater.critic.parameters())
        )
    metrics = updater.optimizer_step(part)
    return models, critics, gradients, metrics, config


def flat(parameters):
    return torch.cat([p.grad.detach().double().flatten() for p in parameters])


def double_critic(critic) -> Any:
    head, trunk = copy.deepcopy(critic.head).double(), copy.deepcopy(critic.trunk)
    if trunk is not None:
        trunk = trunk.double()
        trunk.config._attn_implementation = "eager"
    return head, trunk


# ---- the reference ---------------------------------------------------------------------------------------


def plain_sequences(rollout):
    """Sequences of one context each: themselves as rollouts, nothing shared."""
    starts = [0, *(n for n, turn in enumerate(rollout.turns) if turn.context_ids)]
    for start, stop in pairwise([*starts, len(rollout.turns)]):
        first, *more = rollout.turns[start:stop]
        turns = (replace(first, context_ids=()), *more)
        yield replace(rollout, prompt_ids=first.context_ids or rollout.prompt_ids, turns=turns)


def padded(samples):
    rows = [all_ids(part) for s in samples for part in plain_sequences(s.rollout)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return ids, torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])


def of_completions(values, samples):
    """[B, width, ...] -> a list of [length, ...]: what stands one place before each completion token."""
    rows = iter(values)
    return [
        torch.cat([next(rows)[predicting_positions(part)] for part in plain_sequences(s.rollout)])
        for s in samples
    ]


def logprobs(model, samples):
    ids, mask = padded(samples)
    scores = (model(input_ids=ids, attention_mask=mask).logits / TEMPERATURE).log_softmax(-1)
    return [
        row.gather(-1, torch.tensor(s.rollout.completion.token_ids)[:, None]).squeeze(-1)
        for row, s in zip(of_completions(scores, samples), samples, strict=True)
    ]


def surrogate(loss_type, now, old, advantage, config):
    """The loss of each token of one completion."""
    log_ratio = now - old
    if loss_type == "gspo":
        log_ratio = log_ratio.mean().expand_as(now)
    ratio = log_ratio.exp()
    if loss_type == "reinforce":
        return -advantage * now, ratio
    if loss_type == "cispo":
        return -ratio.detach().clamp(max=config.epsilon_high) * advantage * now, ratio
    if loss_type == "sapo":
        sharp = torch.where(advantage > 0, 1.0, 1.05)
        return -4 / sharp * torch.sigmoid(sharp * (ratio - 1)) * advantage, ratio
    held = ratio.clamp(1 - config.epsilon, 1 + config.epsilon_high)
    return -torch.minimum(ratio * advantage, held * advantage), ratio


def policy_loss(models, samples, advantages, config):
    """`advantages`: one tensor [length] or number for each completion."""
    before, started, now = (logprobs(model, samples) for model in models)
    loss_type, total = config.loss_type, torch.zeros((), dtype=torch.float64)
    for n, sample in enumerate(samples):
        old = started[n].detach()
        losses, ratio = surrogate(loss_type, now[n], old, advantages[n], config)
        if config.importance_correction == "token_truncate":
            sampled = torch.tensor(sample.rollout.completion.logprobs, dtype=torch.float64)
            losses = losses * (old - sampled).exp().clamp(max=config.importance_correction_max)
        difference = before[n].detach() - now[n]
        losses = losses + config.beta * (difference.exp() - difference - 1) * ratio  # k3, bias-corrected
        weight = {"grpo": 1 / (len(losses) * len(samples)), "dr_grpo": 1 / (len(samples) * 16)}
        weight |= dict.fromkeys(("gspo", "sapo"), weight["grpo"])
        total = total + losses.sum() * weight.get(loss_type, 1 / LENGTHS.sum())
    return total


def group_advantages(samples):
    rewards = torch.tensor([s.rollout.score.reward for s in samples], dtype=torch.float64).view(-1, GROUP)
    centred = rewards - rewards.mean(1, keepdim=True)
    return (centred / (rewards.std(1, keepdim=True) + 1e-4)).flatten()


def apart(mine, expected):
    return ((mine - expected).norm() / expected.norm()).item()


def plain_gradient(model, loss):
    model.zero_grad()
    loss.backward()
    return flat([p for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize("kind", ["all weights", "lora", "turns", "rewritten"])
@pytest.mark.parametrize("loss_type", [name for name, loss in LOSSES.items() if not loss.supervised])
def test_every_loss_has_the_plain_float64_gradient(loss_type, kind):
    policy = lora_policy() if kind == "lora" else make_policy()
    samples = make_samples(make_policy(), sampler_shift=-0.1)
    if kind == "turns":
        samples = with_turns(samples)
        assert sum(len(sample.rollout.turns) for sample in samples) == 15
    if kind == "rewritten":
        samples = rewritten(samples)
        assert sum(len(sample.rollout.branches) for sample in samples) == 15
    extra = {"importance_correction": "token_truncate", "importance_correction_max": 1.1}
    models, _, gradients, row, config = our_step(policy, samples, **settings_for(loss_type), **extra)
    expected = plain_gradient(models[2], policy_loss(models, samples, group_advantages(samples), config.loss))
    assert apart(gradients["policy"], expected) < 1e-5
    assert row["kl"] > 1e-3 and row["sampling/importance_sampling_clipped_ratio"] > 0.05
    if loss_type not in ("reinforce", "sapo"):
        assert row["clip_ratio/region_mean"] > 0.02


def credited_by_turn(samples):
    """Episodes whose environment paid something at every turn but the last."""
    generator = torch.Generator().manual_seed(5)
    credited = []
    for sample in with_turns(samples):
        rollout = sample.rollout
        paid = torch.randn(len(rollout.turns) - 1, generator=generator).tolist()
        episode = Episode(finish=Finish.STOP, messages=(), rewards=tuple(paid))
        credited.append(replace(sample, rollout=replace(rollout, episode=episode), by_turn=True))
    return credited


def turn_rewards_by_hand(sample) -> list[float]:
    paid = list(sample.rollout.episode.rewards)
    return [*paid, sample.rollout.score.reward - sum(paid)]


def turn_advantages(samples, discount):
    """Of every token: the discounted rewards from its turn on, less the mean of the group's same turns."""
    returns = []
    for sample in samples:
        earned = turn_rewards_by_hand(sample)
        returns.append(
            [
                sum(discount ** (later - turn) * earned[later] for later in range(turn, len(earned)))
                for turn in range(len(earned))
            ]
        )
    advantages = []
    for number, sample in enumerate(samples):
        group = returns[number // GROUP * GROUP :][:GROUP]
        parts = []
        for turn, value in enumerate(sample.rollout.turns):
            same = torch.tensor([row[turn] for row in group if turn < len(row)], dtype=torch.float64)
            own = returns[number][turn]
            spread = same.std().item() if len(same) > 1 else 0.0
            parts += [(own - same.mean().item()) / (spread + 1e-4)] * len(value.completion.token_ids)
        advantages.append(torch.tensor(parts, dtype=torch.float64))
    return advantages


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_credit_by_turn_has_the_float64_gradient(loss_type):
    samples = credited_by_turn(make_samples(make_policy(), sampler_shift=-0.1))
    changes = {"turn_credit": "turn", "turn_discount": 0.9, **settings_for(loss_type)}
    models, _, gradients, _, config = our_step(make_policy(), samples, **changes)
    advantages = turn_advantages(samples, 0.9)
    assert any(len(set(row.tolist())) > 1 for row in advantages)
    expected = plain_gradient(models[2], policy_loss(models, samples, advantages, config.loss))
    assert apart(gradients["policy"], expected) < 1e-5


# ---- with a critic ---------------------------------------------------------------------------------------


def hidden(model, samples):
    ids, mask = padded(samples)
    out = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    return of_completions(out.hidden_states[-1], samples)


def values_of(critic, model, samples, share):
    """The critic's value of every token; a trunk that it shares with the policy feels `share` of it."""
    head, trunk = critic
    if trunk is None:
        rows = [h * share + h.detach() * (1 - share) for h in hidden(model, samples)]
    else:
        ids, mask = padded(samples)
        rows = of_completions(trunk(input_ids=ids, attention_mask=mask).last_hidden_state, samples)
    return [head(row).squeeze(-1) for row in rows]


def gae_by_hand(samples, values, gamma, lam):
    advantages, returns = [], []
    for sample, value in zip(samples, values, strict=True):
        value, made, after = value.tolist(), [], 0.0
        earned = {len(value) - 1: sample.rollout.score.reward}  # by token
        if sample.by_turn:
            ends = accumulate(len(turn.completion.token_ids) for turn in sample.rollout.turns)
            earned = {end - 1: r for end, r in zip(ends, turn_rewards_by_hand(sample), strict=True)}
        for t in reversed(range(len(value))):
            last = t == len(value) - 1
            delta = earned.get(t, 0.0) - value[t] + (0.0 if last else gamma * value[t + 1])
            after = delta + gamma * lam * after
            made.insert(0, after)
        advantages.append(torch.tensor(made, dtype=torch.float64))
        returns.append(advantages[-1] + torch.tensor(value, dtype=torch.float64))
    every = torch.cat(advantages)
    return [(a - every.mean()) / (every.std() + 1e-4) for a in advantages], returns


@pytest.mark.parametrize("loss_type", ["dapo", "gspo"])
@pytest.mark.parametrize("kind", ["head", "model", "head, by turn", "head, rewritten"])
def test_policy_and_critic_have_the_plain_float64_gradients(kind, loss_type):
    by_turn, change = "by turn" in kind, rewritten if "rewritten" in kind else with_turns
    kind = kind.split(",")[0]
    samples = (credited_by_turn if by_turn else change)(make_samples(make_policy()))
    changes = {"advantage": "gae", "critic": kind, "value_coef": 0.3, "gamma": 0.98, "gae_lambda": 0.9}
    changes |= {"value_clip": 0.2, "turn_credit": "turn" if by_turn else "episode", **settings_for(loss_type)}
    models, critics, gradients, row, config = our_step(make_policy(), samples, critic_shift=0.3, **changes)
    with torch.no_grad():
        old_values = values_of(critics[0], models[1], samples, 0.3)
        advantages, returns = gae_by_hand(samples, old_values, gamma=0.98, lam=0.9)
    loss = policy_loss(models, samples, advantages, config.loss)
    values = values_of(critics[1], models[2], samples, 0.3)
    moved = torch.cat(values) - torch.cat(old_values)
    held = torch.cat(old_values) + moved.clamp(-0.2, 0.2)
    errors = torch.stack([v - torch.cat(returns) for v in (torch.cat(values), held)]).square() / 2
    assert (errors[1] > errors[0]).any() and (moved.abs() > 0.2).any()  # the value clip bites
    value_error = errors.max(0).values.mean()
    assert row["value_loss"] == pytest.approx(value_error.item(), rel=1e-5)
    expected = plain_gradient(models[2], loss + value_error)
    assert apart(gradients["policy"], expected) < 1e-5
    head, trunk = critics[1]
    parts = [*head.parameters(), *([] if trunk is None else trunk.parameters())]
    assert apart(gradients["critic"], flat(parts)) < 1e-5
    without = plain_gradient(models[2], policy_loss(models, samples, advantages, config.loss))
    assert (apart(gradients["policy"], without) > 1e-3) == (kind == "head")  # the shared trunk feels it
