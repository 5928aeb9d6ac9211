"""The update against a plain float64 reference: padded-free packing, micro-batches, references, masters,
skipping.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conftest import make_policy
from tests.support.update import (
    ADVANTAGES,
    SIZES,
    gradient_of,
    make_samples,
    packed_and_padded,
    reference_gradient,
    rewritten,
    sequence_logprobs,
    train_on,
    updater_for,
    with_turns,
)
from whetstone.config import build
from whetstone.config.losses import LOSSES
from whetstone.errors import UserError
from whetstone.model.attention import PackedAttention, packed_segments
from whetstone.model.reference import Reference
from whetstone.optimizer import Optimizer
from whetstone.types import Completion, Finish, Rollout, Score, Segment, Turn
from whetstone.update.packing import Sample, pack, split_minibatches


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "mistral"])
@pytest.mark.parametrize("loss_type", [name for name, loss in LOSSES.items() if not loss.supervised])
def test_gradient_equals_the_plain_float64_one(architecture, loss_type):
    policy = make_policy(architecture)
    samples = make_samples(policy)
    expected = reference_gradient(policy, samples, loss_type, temperature=0.8)
    updater = updater_for(policy, loss_type=loss_type, temperature=0.8)
    gradient, _ = gradient_of(updater, pack(samples, max_tokens=30))
    assert (gradient - expected).norm() / expected.norm() < 1e-5


def test_custom_copy_of_grpo_has_the_same_gradient_bitwise(tmp_path):
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "from whetstone.algorithm.losses import LossOutputs\n\n"
        "def loss(inputs, config):\n"
        "    low, high = 1 - config.epsilon, 1 + config.upper_epsilon\n"
        "    ratio, advantages = inputs.ratio, inputs.advantages\n"
        "    value = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)\n"
        "    clipped = ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))\n"
        "    return LossOutputs(loss=value, clipped=clipped)\n\n"
        "loss.average = 'sequence'\n"
    )
    found = []
    for loss_type in ("grpo", f"{tmp_path / 'own.py'}:loss"):
        policy = make_policy()
        updater = updater_for(policy, loss_type=loss_type)
        found.append(gradient_of(updater, pack(make_samples(policy), max_tokens=30)))
    (gradient, metrics), (own_gradient, own_metrics) = found
    assert torch.equal(gradient, own_gradient) and metrics == own_metrics


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "grpo"},
        {"loss_type": "bnpo", "importance_correction": "sequence_truncate"},
        {"loss_type": "gspo", "off_policy_mask_threshold": 0.05},
        {"loss_type": "dr_grpo", "entropy_coef": 0.1, "top_entropy_quantile": 0.5},
    ],
)
def test_gradient_does_not_depend_on_micro_batches_or_order(settings):
    policy = make_policy()
    samples = make_samples(policy, sampler_shift=0.1)
    gradients = []
    for budget, order in ((1000, 1), (20, 1), (1, 1), (35, -1)):
        batches = pack(samples[::order], max_tokens=budget)
        gradients.append(gradient_of(updater_for(policy, **settings), batches)[0])
        policy.model.zero_grad()
    for gradient in gradients[1:]:
        assert (gradient - gradients[0]).norm() / gradients[0].norm() < 1e-5


def test_no_token_sees_another_sequence():
    policy = make_policy()
    ids = torch.randint(3, 97, (12,), generator=torch.Generator().manual_seed(3))
    positions = torch.cat([torch.arange(5), torch.arange(7)])
    attend = PackedAttention(packed_segments([5, 7]), policy.device)
    before = policy.hidden(ids[None], positions[None], attend)
    changed = ids.clone()
    changed[:5] = (changed[:5] + 11) % 97
    after = policy.hidden(changed[None], positions[None], attend)
    assert torch.equal(before[0, 5:], after[0, 5:])
    assert not torch.allclose(before[0, :5], after[0, :5])


def test_the_same_step_gives_the_same_gradient_to_the_last_bit():
    """Large enough that torch uses threads: shared prompts must not be added up in any order that comes."""
    policy = make_policy(hidden_size=128, head_dim=32, num_hidden_layers=1)
    samples = [replace(s, index=n) for n, s in enumerate(make_samples(policy) * 40)]
    gradients = []
    for _ in range(6):
        gradients.append(gradient_of(updater_for(policy), pack(samples, 100_000))[0])
        policy.model.zero_grad()
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


def test_packs_keep_the_budget_lose_nothing_and_share_prompts():
    samples = make_samples(make_policy())
    batches = pack(samples, max_tokens=25)
    assert all(len(batch.token_ids) <= 25 for batch in batches)
    assert sum(len(batch.targets) for batch in batches) == sum(completion for _, completion in SIZES)
    (one,) = pack(samples, max_tokens=1000)
    # prompts of 4, 9 and 8 tokens stand there once each, beside all completions
    assert len(one.token_ids) == 4 + 9 + 8 + sum(completion for _, completion in SIZES)
    # the largest group comes first: its prompt, then its completions of 12, 7 and 3 tokens
    assert [tuple(segment) for segment in one.segments[:4]] == [
        (0, 4, ()),
        (4, 12, ((0, 4),)),
        (16, 7, ((0, 4),)),
        (23, 3, ((0, 4),)),
    ]
    # the last prompt token predicts every completion's first token; positions go on from the prompt's end
    assert [
        one.logit_positions[0].item(),
        one.logit_positions[12].item(),
        one.logit_positions[19].item(),
    ] == [3, 3, 3]
    assert one.position_ids[[4, 16, 23]].tolist() == [4, 4, 4]
    assert one.targets[:12].tolist() == list(samples[2].rollout.completion.token_ids)


@pytest.mark.parametrize(("count", "parts", "sizes"), [
    (6, 4, [1, 2, 1, 2]), (5, 2, [2, 3]), (3, 3, [1, 1, 1]), (2, 5, [1] * 5), (1, 8, [1] * 8),
])  # fmt: skip
def test_minibatches_are_never_empty_and_leave_no_sample_out(count, parts, sizes):
    """Rejection sampling keeps any number of samples, down to one."""
    samples = make_samples(make_policy())[:count]
    split = split_minibatches(samples, parts, seed=5)
    assert [len(part) for part in split] == sizes
    found = [sum(s is sample for part in split for s in part) for sample in samples]
    assert min(found) >= 1 and max(found) - min(found) <= 1


def test_split_is_a_partition_and_repeats():
    samples = make_samples(make_policy())
    parts = split_minibatches(samples, 3, seed=5)
    assert [len(part) for part in parts] == [2, 2, 2]
    assert {id(s) for part in parts for s in part} == {id(s) for s in samples}
    assert split_minibatches(samples, 3, seed=5) == parts and split_minibatches(samples, 3, seed=6) != parts


def test_kl_is_zero_before_and_positive_after_the_policy_moved():
    policy = make_policy()
    samples = make_samples(policy)
    updater = updater_for(
        policy, Reference.from_policy(policy, policy, moving=False), beta=0.1, learning_rate=1e-2
    )
    first = train_on(updater, [pack(samples, 100)])
    second = train_on(updater, [pack(samples, 100)])
    assert first["kl"] == pytest.approx(0.0, abs=1e-6)
    assert second["kl"] > 1e-3


def test_lora_reference_is_the_adapter_switched_off():
    from whetstone.config.sections import ModelConfig
    from whetstone.model.lora import add_lora
    from whetstone.model.policy import Policy

    plain = make_policy()
    samples = make_samples(plain)
    model = add_lora(plain.model, ModelConfig(use_peft=True, lora_r=4), None)
    policy = Policy(model, plain.tokenizer, plain.device)
    trained = sum(p.numel() for p in policy.parameters())
    assert trained < 0.5 * sum(p.numel() for p in model.parameters())
    reference = Reference.from_policy(policy, policy, moving=False)
    assert reference.weights is None  # no second copy of anything
    updater = updater_for(policy, reference, beta=0.1, learning_rate=1e-2)
    rows = [train_on(updater, [pack(samples, 100)]) for _ in range(3)]
    assert rows[0]["kl"] == pytest.approx(0.0, abs=1e-6) and rows[2]["kl"] > 1e-4
    with reference.swapped_in():
        (batch,) = pack(samples, 1000)
        untouched, expected = make_policy(), []
        for sample in [samples[i] for i in (2, 0, 1, 4, 3, 5)]:  # as they were packed
            prompt, completion = sample.rollout.prompt_ids, sample.rollout.completion.token_ids
            expected.append(sequence_logprobs(untouched, [*prompt, *completion], len(prompt)))
        assert torch.allclose(policy.logprobs(batch, 1.0), torch.cat(expected), atol=1e-5)


def test_second_iteration_uses_the_ratio_to_the_first():
    policy = make_policy()
    samples = make_samples(policy)
    updater = updater_for(policy, num_iterations=4, learning_rate=2e-2, epsilon=0.05)
    row = train_on(updater, [pack(samples, 100)])
    assert row["clip_ratio/region_mean"] > 0.05  # the policy has moved beyond the clip by the last iteration
    assert (
        row["sampling/sampling_logp_difference/mean"] < 1e-4
    )  # old logprobs are those of the policy that sampled


def test_off_policy_mask_drops_bad_sequences_that_fell():
    policy = make_policy()
    samples = make_samples(
        policy, sampler_shift=0.5
    )  # as if the engine had found them likelier by 0.5 a token
    row = train_on(updater_for(policy, off_policy_mask_threshold=0.4), [pack(samples, 100)])
    bad = sum(
        completion for (_, completion), advantage in zip(SIZES, ADVANTAGES, strict=True) if advantage < 0
    )
    assert row["masked_ratio/off_policy"] == pytest.approx(bad / sum(c for _, c in SIZES))


def broken_sample(sample):
    score = replace(sample.rollout.score, reward=math.nan)
    return replace(sample, rollout=replace(sample.rollout, score=score))


def test_nonfinite_steps_are_skipped_then_stop_the_run():
    policy = make_policy()
    samples = make_samples(policy)
    broken = [broken_sample(samples[0]), *samples[1:]]
    updater = updater_for(policy, max_skipped_steps=2)
    before = [p.detach().clone() for p in policy.parameters()]
    assert train_on(updater, [pack(broken, 100)])["skipped_steps"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    assert train_on(updater, [pack(samples, 100)])["skipped_steps"] == 0  # a good one in between
    train_on(updater, [pack(broken, 100)])
    with pytest.raises(UserError, match="2 steps"):
        train_on(updater, [pack(broken, 100)])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_of_the_critic_that_is_not_finite_is_skipped(value):
    policy = make_policy()
    batches = pack(make_samples(policy), 100)
    updater = updater_for(policy, advantage="gae", critic="model", max_skipped_steps=2)
    weights = [*policy.parameters(), *updater.critic.parameters()]
    before = [weight.detach().clone() for weight in weights]
    break_it = updater.critic.head.weight.register_hook(lambda gradient: gradient * value)
    row = train_on(updater, [batches])
    assert row["skipped_steps"] == 1 and math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])
    assert all(torch.equal(a, b) for a, b in zip(before, weights, strict=True))
    with pytest.raises(UserError, match=rf"gradient norm of critic {value}.*critic_learning_rate"):
        train_on(updater, [batches])
    again = updater_for(policy, advantage="gae", critic="model")
    break_it.remove()
    assert train_on(again, [batches])["skipped_steps"] == 0
    assert not torch.equal(again.critic.head.weight, before[-1])


def test_top_entropy_with_every_completion_masked_does_nothing():
    policy = make_policy()
    masked = [replace(sample, keep=False) for sample in make_samples(policy)]
    before = [weight.detach().clone() for weight in policy.parameters()]
    row = train_on(updater_for(policy, top_entropy_quantile=0.2), [pack(masked, 100)])
    assert row["grad_norm"] == row["loss"] == row["skipped_steps"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


def test_half_precision_weights_do_not_lose_small_updates():
    """1000 steps of 1e-6 on a bf16 weight of 1: without a master nothing would ever change."""
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    config = build({"learning_rate": 1e-5, "lr_scheduler_type": "constant"}).update
    optimizer = Optimizer([weight], config, num_steps=1000, warmup_steps=0)
    for _ in range(1000):
        (weight.sum() * 1.0).backward()
        optimizer.step(optimizer.gradient_norm())
        optimizer.finish()
    assert optimizer.state_tensors()["0"]["master"].tolist() == pytest.approx(
        [0.99] * 4, rel=1e-4
    )  # Adam moves by lr a step
    assert weight.float().tolist() == pytest.approx([0.99] * 4, abs=4e-3)
    assert weight[0].item() != 1.0


def test_gradients_are_clipped_to_the_norm():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = Optimizer([weight], build({"max_grad_norm": 1.0}).update, num_steps=1, warmup_steps=0)
    (weight * torch.tensor([3.0, 4.0])).sum().backward()
    norm = optimizer.gradient_norm()
    assert norm == pytest.approx(5.0)
    optimizer.step(norm)
    assert weight.grad is not None and weight.grad.tolist() == pytest.approx([0.6, 0.8], rel=1e-5)


def test_schedule_warms_up_and_decays():
    weight = torch.nn.Parameter(torch.zeros(1))
    config = build({"learning_rate": 1.0, "lr_scheduler_type": "linear"}).update
    optimizer = Optimizer([weight], config, num_steps=10, warmup_steps=2)
    rates = []
    for _ in range(10):
        rates.append(optimizer.learning_rate)
        weight.grad = torch.zeros(1)
        optimizer.step(0.0)
        optimizer.finish()
    assert rates == pytest.approx([0.0, 0.5, 1.0, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])


def test_an_unknown_schedule_is_refused_with_the_known_ones():
    weight = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(UserError, match="cosine"):
        Optimizer([weight], build({"lr_scheduler_type": "cosinus"}).update, num_steps=1, warmup_steps=0)


def schedule_of(kind, rate=1e-3, num_steps=4, warmup_steps=0, **kwargs):
    """The rates of all steps, with the move of the schedule after the last one."""
    flat = {"learning_rate": rate, "lr_scheduler_type": kind, "lr_scheduler_kwargs": kwargs}
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = Optimizer([weight], build(flat).update, num_steps=num_steps, warmup_steps=warmup_steps)
    rates = []
    for _ in range(num_steps):
        rates.append(optimizer.learning_rate)
        optimizer.finish()
    return rates


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("reduce_lr_on_plateau", {}, "choose one of linear"),
        ("greedy", {}, "choose one of linear"),
        ("cosine_with_min_lr", {}, "min_lr"),
        ("cosine_warmup_with_min_lr", {}, "min_lr"),
        ("cosine_with_min_lr", {"min_lr": 1e-6, "rate": 0.0}, "division by zero"),
        ("polynomial", {"rate": 1e-8}, "must be smaller than initial lr"),
        ("polynomial", {"power": -1}, "cannot be raised to a negative power|lr_scheduler_kwargs"),
        ("inverse_sqrt", {"timescale": math.nan}, "step 3 nan"),
        ("cosine", {"no_such": 1}, "no_such"),
    ],
)
def test_schedules_that_can_not_work_are_refused_at_the_start(kind, settings, message):
    with pytest.raises(UserError, match=message) as error:
        schedule_of(kind, **settings)
    assert "plateau" not in str(error.value).replace(f"'{kind}'", "")  # not offered


@pytest.mark.parametrize("warmup", [0, 3, 4, 6])
def test_schedules_reach_their_last_step_whatever_the_warm_up(warmup):
    """Rates are those of transformers with as many steps; the last move belongs to no step."""
    from transformers.optimization import get_scheduler
    from transformers.trainer_utils import SchedulerType

    needs = {"cosine_with_min_lr": {"min_lr": 1e-5}, "cosine_warmup_with_min_lr": {"min_lr": 1e-5}}
    needs["warmup_stable_decay"] = {"num_decay_steps": 1}
    for kind in {member.value for member in SchedulerType} - {"reduce_lr_on_plateau", "greedy"}:
        kwargs = needs.get(kind, {})
        rates = schedule_of(kind, num_steps=4, warmup_steps=warmup, **kwargs)
        holder = torch.optim.SGD([torch.zeros(1)], lr=1e-3)
        theirs: Any = get_scheduler(kind, holder, warmup, 4, kwargs)
        for step, rate in enumerate(rates):
            assert rate == pytest.approx(theirs.lr_lambdas[0](step) * 1e-3), (kind, step)


def test_rewritten_histories_share_their_common_prefix():
    """Prompt 1 2 3; then 4 5 said. The second context repeats all but the 5, the third goes back to the first
    one, and the fourth is new.
    """
    said = Completion(token_ids=(7, 8), logprobs=(-1.0, -2.0), finish=Finish.STOP, policy_version=0)
    turns = (
        Turn(completion=replace(said, token_ids=(4, 5)), observation_ids=(6,)),
        Turn(completion=said),
        Turn(completion=said, context_ids=(1, 2, 3, 4, 9)),
        Turn(completion=said, context_ids=(1, 2, 3, 4, 5, 6, 7, 8, 10)),
        Turn(completion=said, context_ids=(2, 1)),
        Turn(completion=said, context_ids=(1, 2, 3, 4, 9)),
    )
    score = Score(reward=1.0, parts={}, answer=None)
    rollout = Rollout(prompt_ids=(1, 2, 3), turns=turns, text="", score=score)
    assert rollout.num_tokens == 3 + 5 + 3 + 3 + 4 + 2 and rollout.num_observed == 1 + 1 + 1 + 2
    [batch] = pack([Sample(rollout=rollout, index=0, keep=True)], 100)
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 7, 8, 10, 7, 8, 2, 1, 7, 8, 7, 8]
    assert batch.segments == [
        Segment(0, 3),
        Segment(3, 5, ((0, 3),)),
        Segment(8, 3, ((0, 3), (3, 1))),
        Segment(11, 3, ((0, 3), (3, 5))),
        Segment(14, 4),
        Segment(18, 2, ((0, 3), (3, 1), (8, 1))),
    ]
    assert batch.logit_positions.tolist() == [2, 3, 5, 6, 8, 9, 11, 12, 15, 16, 8, 18]
    assert batch.position_ids[8:].tolist() == [4, 5, 6, 8, 9, 10, 0, 1, 2, 3, 5, 6]
    assert batch.targets.tolist() == [4, 5, 7, 8, 7, 8, 7, 8, 7, 8, 7, 8]
    assert batch.sequence_ids.tolist() == [0] * 12


@pytest.mark.parametrize("change", [list, with_turns, rewritten])
def test_padded_rows_have_the_logprobs_of_packed_ones(change):
    policy = make_policy()
    [batch] = pack(change(make_samples(policy)), 1000)
    packed, padded = packed_and_padded(policy, batch)
    assert (packed - padded).abs().max() < 1e-5
