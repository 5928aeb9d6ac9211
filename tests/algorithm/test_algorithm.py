"""The mathematics by hand: advantages, every loss and its gradient on four tokens, KL, masks, weights."""

import math
from typing import Any

import pytest
import torch

from whetstone.algorithm import losses
from whetstone.algorithm.advantages import discounted, estimate, explained_variance, gae, value_loss, whiten
from whetstone.algorithm.losses import (
    ESTIMATORS,
    LossInputs,
    LossOutputs,
    importance_ratio,
    policy_loss,
    ratio_level,
)
from whetstone.algorithm.masks import (
    entropy_threshold,
    high_entropy,
    off_policy_keep,
    sampler_weights,
    sequence_mean,
)
from whetstone.algorithm.reduce import token_weights
from whetstone.config.losses import LOSSES, Loss
from whetstone.config.sections import LossConfig
from whetstone.errors import UserError

# ---- advantages -------------------------------------------------------------------------------------------

REWARDS = torch.tensor([[1.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0]])


def of_episodes(rewards: torch.Tensor, **settings: str) -> torch.Tensor:
    """One advantage for each completion."""
    return estimate(rewards[..., None], torch.ones(*rewards.shape, 1), **settings)[..., 0]


def test_group_advantages_by_hand():
    # first group: mean 0.5, deviation sqrt(4 * 0.25 / 3) = 0.57735; second: no spread, no advantage
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert torch.allclose(
        of_episodes(REWARDS, baseline="group", scale="group"),
        torch.tensor([[expected, -expected, -expected, expected], [0.0, 0.0, 0.0, 0.0]]),
    )
    plain = of_episodes(REWARDS, baseline="group", scale="none")
    assert plain.tolist() == [[0.5, -0.5, -0.5, 0.5], [0.0, 0.0, 0.0, 0.0]]
    # all eight: mean 1.25, squared deviations 2*0.0625 + 2*1.5625 + 4*0.5625 = 5.5
    by_batch = of_episodes(REWARDS, baseline="group", scale="batch")
    assert by_batch[0, 0].item() == pytest.approx(0.5 / (math.sqrt(5.5 / 7) + 1e-4))


@pytest.mark.parametrize("reward", [1.2, 0.1, 3.6, -0.7])
@pytest.mark.parametrize("baseline", ["group", "rloo", "reinforce_pp"])
def test_equal_rewards_have_advantage_zero(reward, baseline):
    # the float32 mean of three 1.2 is 1.2000000477 + 1e-7, which over a spread of 1e-7 + 1e-4 was 1.2e-3
    for size in (2, 3, 5, 7):
        advantages = of_episodes(torch.full((2, size), reward), baseline=baseline, scale="group")
        assert advantages.abs().max() == 0


def test_leave_one_out_by_hand():
    # 1 minus the mean of (0, 0, 1) is 2/3; 0 minus the mean of (1, 0, 1) is -2/3
    advantages = of_episodes(REWARDS, baseline="rloo", scale="none")
    assert advantages[0].tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])


def test_reinforce_pp_compares_with_the_whole_batch():
    advantages = of_episodes(REWARDS, baseline="reinforce_pp", scale="none")
    spread = math.sqrt(5.5 / 7) + 1e-4
    assert advantages[0].tolist() == pytest.approx(
        [-0.25 / spread, -1.25 / spread, -1.25 / spread, -0.25 / spread]
    )
    assert advantages.mean().item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("baseline", ["group", "rloo"])
def test_a_group_of_one_has_no_advantage_and_no_nan(baseline):
    ones = torch.tensor([[3.0], [1.0]])
    assert of_episodes(ones, baseline=baseline, scale="group").tolist() == [[0.0], [0.0]]


def test_a_turn_is_credited_with_what_comes_after_it():
    # Three episodes of a problem, of 3, 2 and 1 turns.
    rewards = torch.tensor([[[1.0, 0.0, 2.0], [0.0, 4.0, 0.0], [6.0, 0.0, 0.0]]])
    exists = torch.tensor([[[True, True, True], [True, True, False], [True, False, False]]])
    assert discounted(rewards, 1.0).tolist() == [[[3.0, 2.0, 2.0], [4.0, 4.0, 0.0], [6.0, 0.0, 0.0]]]
    returns = discounted(rewards, 0.5)
    assert returns.tolist() == [[[1.5, 1.0, 2.0], [2.0, 4.0, 0.0], [6.0, 0.0, 0.0]]]
    # The first turns have mean 9.5 / 3, the second ones 2.5; the third has nothing to be compared with.
    plain = estimate(returns, exists, baseline="group", scale="none")[0]
    first = [1.5 - 9.5 / 3, 2 - 9.5 / 3, 6 - 9.5 / 3]
    assert plain[:, 0].tolist() == pytest.approx(first)
    assert plain[:, 1].tolist() == pytest.approx([-1.5, 1.5, 0.0])
    assert plain[:, 2].tolist() == [0.0, 0.0, 0.0]
    # Of those that exist: sum of squares around the mean by n - 1.
    scaled = estimate(returns, exists, baseline="group", scale="group")[0]
    assert scaled[0, 1].item() == pytest.approx(-1.5 / (math.sqrt(4.5) + 1e-4))
    spread = math.sqrt(sum(value * value for value in first) / 2)
    assert scaled[2, 0].item() == pytest.approx(first[2] / (spread + 1e-4))
    others = estimate(returns, exists, baseline="rloo", scale="none")[0]
    assert others[0].tolist() == pytest.approx([1.5 - 4.0, 1.0 - 4.0, 0.0])
    every = [1.5, 1.0, 2.0, 2.0, 4.0, 6.0]
    mean = sum(every) / 6
    deviation = math.sqrt(sum((value - mean) ** 2 for value in every) / 5) + 1e-4
    batch = estimate(returns, exists, baseline="reinforce_pp", scale="none")[0]
    assert batch[1].tolist() == pytest.approx([(2 - mean) / deviation, (4 - mean) / deviation, 0.0])


# ---- losses -----------------------------------------------------------------------------------------------
# Four tokens in two sequences: ratios 1.5, 0.5 | 1.1, 1.5 with advantages 1, -1 | 2, -1.

RATIOS = torch.tensor([1.5, 0.5, 1.1, 1.5], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, -1.0, 2.0, -1.0], dtype=torch.float64)
OLD = torch.tensor([-1.0, -2.0, -0.5, -0.7], dtype=torch.float64)
SEQUENCE = torch.tensor([0, 0, 1, 1])


def loss_and_gradient(config, *, reference=None, factor=None, ratios=RATIOS) -> Any:
    logprobs = (OLD + ratios.log()).requires_grad_()
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=OLD,
        advantages=ADVANTAGES,
        ratio=importance_ratio(logprobs, OLD, SEQUENCE, 2, ratio_level(config)),
        sequence_ids=SEQUENCE,
        num_sequences=2,
    )
    outputs = policy_loss(inputs, config, beta=config.beta, reference_logprobs=reference, multiplier=factor)
    (gradient,) = torch.autograd.grad(outputs.loss.sum(), logprobs)
    return outputs, gradient


def near(tensor, values):
    return tensor.tolist() == pytest.approx(values, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_clipped_loss_and_gradient_by_hand(loss_type):
    outputs, gradient = loss_and_gradient(LossConfig(loss_type=loss_type, epsilon=0.2))
    # -min(rA, clip(r)A): token 1: -min(1.5, 1.2); 2: -min(-0.5, -0.8); 3: -2.2; 4: -min(-1.5, -1.2)
    assert near(outputs.loss, [-1.2, 0.8, -2.2, 1.5])
    # clipped tokens have no gradient; the others have -rA
    assert near(gradient, [0.0, 0.0, -2.2, 1.5])
    assert outputs.clipped.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_clip_higher_and_two_sided_clip():
    outputs, gradient = loss_and_gradient(LossConfig(epsilon=0.2, epsilon_high=0.6))
    assert outputs.loss[0].item() == pytest.approx(-1.5) and gradient[0].item() == pytest.approx(-1.5)
    outputs, gradient = loss_and_gradient(LossConfig(epsilon=0.2, delta=1.3))
    assert outputs.loss[3].item() == pytest.approx(1.3) and gradient[3].item() == 0.0


@pytest.mark.parametrize("config", [
    LossConfig(loss_type="gspo", epsilon=0.2),
    LossConfig(loss_type="grpo", importance_sampling_level="sequence", epsilon=0.2),
])  # fmt: skip
def test_sequence_ratio_by_hand(config):
    # geometric means: s1 = sqrt(1.5 * 0.5) = 0.8660, inside the clip; s2 = sqrt(1.1 * 1.5) = 1.2845, outside
    first, second = math.sqrt(0.75), math.sqrt(1.65)
    outputs, gradient = loss_and_gradient(config)
    # token 3: -min(2 s2, 2 * 1.2); token 4: -min(-s2, -1.2)
    assert near(outputs.loss, [-first, first, -2.4, second])
    # each token moves its sequence's ratio by s/2: -A s/2 summed over the sequence (1 - 1 = 0 | only token 4)
    assert near(gradient, [0.0, 0.0, second / 2, second / 2])
    assert outputs.clipped.tolist() == [0.0, 0.0, 1.0, 0.0]


def test_cispo_by_hand():
    outputs, gradient = loss_and_gradient(LossConfig(loss_type="cispo", epsilon_high=1.2))
    weights = [1.2, 0.5, 1.1, 1.2]
    logprobs = OLD + RATIOS.log()
    expected = [-w * a * p for w, a, p in zip(weights, ADVANTAGES.tolist(), logprobs.tolist(), strict=True)]
    assert near(outputs.loss, expected)
    assert near(gradient, [-1.2, 0.5, -2.2, 1.2])  # -wA: a bounded token keeps its gradient
    assert outputs.clipped.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert LossConfig(loss_type="cispo").upper_epsilon == 5.0


def test_sapo_by_hand():
    outputs, gradient = loss_and_gradient(LossConfig(loss_type="sapo"))
    expected, slopes = [], []
    for ratio, advantage in zip(RATIOS.tolist(), ADVANTAGES.tolist(), strict=True):
        t = 1.0 if advantage > 0 else 1.05
        sigmoid = 1 / (1 + math.exp(-t * (ratio - 1)))
        expected.append(-4 / t * sigmoid * advantage)
        slopes.append(-4 * sigmoid * (1 - sigmoid) * ratio * advantage)
    assert near(outputs.loss, expected)
    assert near(gradient, slopes)


def test_reinforce_by_hand():
    outputs, gradient = loss_and_gradient(LossConfig(loss_type="reinforce"))
    assert near(outputs.loss, (-ADVANTAGES * (OLD + RATIOS.log())).tolist())
    assert near(gradient, [-1.0, 1.0, -2.0, 1.0])


@pytest.mark.parametrize("loss_type", LOSSES)
def test_at_ratio_one_every_loss_has_the_gradient_of_reinforce(loss_type):
    _, gradient = loss_and_gradient(
        LossConfig(loss_type=loss_type), ratios=torch.ones(4, dtype=torch.float64)
    )
    if loss_type == "gspo":  # the mean over a sequence: (1 - 1) / 2 and (2 - 1) / 2 for both of its tokens
        assert near(gradient, [0.0, 0.0, -0.5, -0.5])
    elif loss_type == "sft":  # without advantages
        assert near(gradient, [-1.0, -1.0, -1.0, -1.0])
    else:
        assert near(gradient, (-ADVANTAGES).tolist())


def test_a_factor_scales_the_policy_loss_but_not_the_kl():
    reference = OLD - 0.3
    factor = torch.tensor([1.0, 0.5, 0.0, 0.0], dtype=torch.float64)
    plain, _ = loss_and_gradient(LossConfig())
    outputs, _ = loss_and_gradient(LossConfig(beta=0.1), reference=reference, factor=factor)
    assert near(outputs.loss, (plain.loss * factor + 0.1 * outputs.kl).tolist())


# ---- KL ---------------------------------------------------------------------------------------------------


def test_kl_estimators_and_their_gradients_by_hand():
    # reference = old, so d = log p - log q = log ratio
    for name, value, slope in (
        ("k1", lambda r: math.log(r), lambda r: 1.0),
        ("k2", lambda r: math.log(r) ** 2 / 2, lambda r: math.log(r)),
        ("k3", lambda r: 1 / r + math.log(r) - 1, lambda r: 1 - 1 / r),
    ):
        logprobs = (OLD + RATIOS.log()).requires_grad_()
        kl = ESTIMATORS[name](logprobs, OLD)
        (gradient,) = torch.autograd.grad(kl.sum(), logprobs)
        assert near(kl, [value(r) for r in RATIOS.tolist()])
        assert near(gradient, [slope(r) for r in RATIOS.tolist()])


def test_kl_estimators_agree_with_the_divergence_in_expectation():
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.45, 0.35, 0.2], dtype=torch.float64)
    exact = (policy * (policy / reference).log()).sum().item()
    means = {
        name: (policy * kl(policy.log(), reference.log())).sum().item() for name, kl in ESTIMATORS.items()
    }
    assert means["k1"] == pytest.approx(exact, rel=1e-12)
    assert means["k3"] == pytest.approx(exact, rel=1e-12)
    assert means["k2"] == pytest.approx(exact, rel=0.02)  # k2 is biased, by little where the two are near


@pytest.mark.parametrize(
    ("estimator", "corrected", "cosine", "length"),
    [
        ("k1", True, 1, 1), ("k2", True, 0.987, 0.878), ("k3", True, 1, 1),
        ("k1", False, None, 0), ("k2", False, 1, 1), ("k3", False, 0.990, 1.470),
    ],
)  # fmt: skip
def test_the_expected_gradient_of_each_kl_estimator(estimator, corrected, cosine, length):
    """On-policy, the exact expectation over six tokens, beside the gradient of the KL itself: the table of
    docs/losses.md.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()
    reference = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    old = logprobs.detach()
    ids = torch.arange(6)
    inputs = LossInputs(
        logprobs=logprobs, old_logprobs=old, advantages=torch.zeros(6), ratio=(logprobs - old).exp(),
        sequence_ids=ids, num_sequences=6,
    )  # fmt: skip
    config = LossConfig(beta=1.0, kl_estimator=estimator, use_bias_correction_kl=corrected)
    outputs = policy_loss(inputs, config, beta=1.0, reference_logprobs=reference)
    (gradient,) = torch.autograd.grad((old.exp() * outputs.loss).sum(), logits)
    assert (gradient.norm() / exact.norm()).item() == pytest.approx(length, abs=1e-3)
    if cosine is not None:
        assert torch.cosine_similarity(gradient, exact, dim=0).item() == pytest.approx(cosine, abs=1e-3)


def test_bias_corrected_kl_is_weighted_by_the_ratio():
    config: Any = {"epsilon": 0.2, "beta": 0.1}
    plain, _ = loss_and_gradient(LossConfig(**config, use_bias_correction_kl=False), reference=OLD)
    corrected, gradient = loss_and_gradient(LossConfig(**config), reference=OLD)
    assert near(corrected.kl, (plain.kl * RATIOS).tolist())
    # r k3 = r (1/r + log r - 1) = 1 + r log r - r; its derivative by log p is r log r. Token 1 is clipped.
    assert gradient[0].item() == pytest.approx(0.1 * 1.5 * math.log(1.5))


# ---- masks and weights ------------------------------------------------------------------------------------


def test_off_policy_rule_keeps_what_rose():
    advantages = torch.tensor([1.0, -1.0, -1.0, -1.0])
    drift = torch.tensor([5.0, 0.3, 0.1, -5.0])  # the last one's probability rose
    assert off_policy_keep(advantages, drift, 0.2).tolist() == [1.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(("mode", "expected"), [
    ("token_truncate", [2.0, 0.5, 3.0, 0.5]),
    ("token_mask", [2.0, 0.5, 0.0, 0.5]),
    ("sequence_truncate", [1.0, 1.0, 2.0, 2.0]),
    ("sequence_mask", [1.0, 1.0, 2.0, 2.0]),
])  # fmt: skip
def test_sampler_weights_by_hand(mode, expected):
    difference = torch.tensor([2.0, 0.5, 4.0, 0.5]).log()  # products: 1 and 2
    config = LossConfig(importance_correction=mode, importance_correction_min=0.4)
    assert sampler_weights(difference, SEQUENCE, 2, config).tolist() == pytest.approx(expected)


def test_a_sequence_beyond_the_bound_is_masked_whole():
    config = LossConfig(importance_correction="sequence_mask", importance_correction_max=1.5)
    assert sampler_weights(
        torch.tensor([2.0, 0.5, 4.0, 0.5]).log(), SEQUENCE, 2, config
    ).tolist() == pytest.approx([1.0, 1.0, 0.0, 0.0])


def test_high_entropy_tokens():
    assert high_entropy(torch.tensor([0.1, 0.5, 0.5, 2.0]), torch.tensor(0.5)).tolist() == [
        0.0,
        1.0,
        1.0,
        1.0,
    ]


@pytest.mark.parametrize("fraction", [0.001, 0.2, 0.3, 0.5, 0.7, 0.999])
def test_the_entropy_threshold_keeps_what_a_quantile_does(fraction):
    generator = torch.Generator().manual_seed(0)
    for count in (1, 2, 10, 11, 1000):
        for values in (torch.rand(count, generator=generator), torch.ones(count)):
            quantile = torch.quantile(values.double(), 1 - fraction)
            expected = (values.double() >= quantile - 1e-9).tolist()
            assert (values >= entropy_threshold(values, fraction)).tolist() == expected
    assert entropy_threshold(torch.zeros(0), fraction) == 0


def test_more_entropies_than_quantile_takes_have_a_threshold():
    values = torch.arange(2**24 + 2).float()
    assert entropy_threshold(values, 0.5).item() == 2**23 + 1  # half of 2^24 + 1 gaps, upwards
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(values, 0.5)


def test_sequence_mean():
    means = sequence_mean(torch.tensor([1.0, 3.0, 10.0]), torch.tensor([0, 0, 2]), 3)
    assert means.tolist() == [2.0, 0.0, 10.0]


def test_token_weights_by_hand():
    lengths, keep = torch.tensor([2, 6, 4]), torch.tensor([1.0, 1.0, 0.0])
    for kind in ("grpo", "gspo", "sapo"):
        weights = token_weights(lengths, keep, loss_type=kind, max_length=10)
        assert torch.allclose(weights, torch.tensor([1 / 6, 1 / 18, 0.0]))
    for kind in ("bnpo", "dapo", "cispo", "reinforce"):
        weights = token_weights(lengths, keep, loss_type=kind, max_length=10)
        assert torch.allclose(weights, torch.tensor([1 / 8, 1 / 8, 0.0]))
    weights = token_weights(lengths, keep, loss_type="dr_grpo", max_length=10)
    assert torch.allclose(weights, torch.tensor([1 / 30, 1 / 30, 0.0]))


def test_every_loss_is_a_record_and_a_name_of_the_configuration():
    from typing import get_args

    names, _ = get_args(LossConfig.model_fields["loss_type"].annotation)
    assert set(get_args(names)) == set(LOSSES)
    for kind in LOSSES:
        token_weights(torch.tensor([1]), torch.tensor([1.0]), loss_type=kind, max_length=1)


@pytest.mark.parametrize(("average", "expected"), [("sequence", 1 / 4), ("token", 0.25), ("constant", 0.05)])
def test_a_loss_is_one_record(monkeypatch: pytest.MonkeyPatch, average: Any, expected: float):
    """What CONTRIBUTING.md says: a function and a record."""

    def halved(inputs, config):
        loss = -0.5 * inputs.ratio * inputs.advantages
        return LossOutputs(loss=loss, clipped=torch.zeros_like(loss))

    monkeypatch.setattr(losses, "halved", halved, raising=False)
    monkeypatch.setitem(LOSSES, "halved", Loss(function="halved", average=average, ratio="sequence"))
    config = LossConfig(loss_type="halved")
    first, second = math.sqrt(1.5 * 0.5), math.sqrt(1.1 * 1.5)  # the ratios of the two sequences
    outputs, _ = loss_and_gradient(config)
    assert near(outputs.loss, [-0.5 * first, 0.5 * first, -second, 0.5 * second])
    weights = token_weights(torch.tensor([4]), torch.tensor([1.0]), loss_type="halved", max_length=20)
    assert torch.allclose(weights, torch.tensor([expected]))


OWN_LOSS = """
from whetstone.algorithm.losses import LossOutputs, clipped_surrogate

def copy_of_gspo(inputs, config):
    return clipped_surrogate(inputs, config)

copy_of_gspo.average = "sequence"
copy_of_gspo.ratio = "sequence"

def plain(inputs, config):
    return LossOutputs(loss=-inputs.advantages * inputs.logprobs, clipped=inputs.ratio > 2)

def averaged(inputs, config):
    return LossOutputs(loss=inputs.logprobs.mean(), clipped=inputs.ratio > 2)

def bare(inputs, config):
    return inputs.logprobs

def odd(inputs, config):
    return LossOutputs(loss=inputs.logprobs, clipped=inputs.ratio > 2)

odd.average = "median"
"""


def test_a_loss_of_the_users_own_file(tmp_path):
    (tmp_path / "own.py").write_text(OWN_LOSS)

    def own(name: str) -> LossConfig:
        return LossConfig(loss_type=f"{tmp_path / 'own.py'}:{name}")

    ours, gradient = loss_and_gradient(LossConfig(loss_type="gspo"))
    theirs, same_gradient = loss_and_gradient(own("copy_of_gspo"))
    assert torch.equal(ours.loss, theirs.loss) and torch.equal(gradient, same_gradient)
    weights = {"lengths_S": torch.tensor([2, 6]), "mask_S": torch.tensor([1.0, 1.0]), "max_length": 9}
    for name, built_in in (("copy_of_gspo", "gspo"), ("plain", "dapo")):
        expected = token_weights(**weights, loss_type=built_in)
        assert torch.equal(token_weights(**weights, loss_type=own(name).loss_type), expected)
    for name in ("averaged", "bare", "odd", "missing"):
        with pytest.raises(UserError, match="loss_type"):
            loss_and_gradient(own(name))


def test_cispo_refuses_a_cap_below_one():
    with pytest.raises(ValueError, match=r"epsilon_high.* 5"):
        LossConfig(loss_type="cispo", epsilon_high=0.28)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"importance_correction_min": 4.0}, r"importance_correction_min \(4\) is above .*max \(3\)"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**settings)


# ---- generalised advantage estimation ---------------------------------------------------------------------


def test_gae_against_a_written_out_table():
    """gamma 0.9, lambda 0.8; a completion of three tokens with reward 1 at its end, one of a single token.

    t   V     r   delta = r + 0.9 V' - V       A = delta + 0.72 A'
    3  0.5   1.0  1.0 - 0.5          = 0.50    0.50
    2  0.4   0.0  0.9 * 0.5 - 0.4    = 0.05    0.05 + 0.72 * 0.50  = 0.41
    1  0.2   0.0  0.9 * 0.4 - 0.2    = 0.16    0.16 + 0.72 * 0.41  = 0.4552
    1  0.3  -1.0  -1.0 - 0.3         = -1.30   -1.30
    """
    rewards = torch.tensor([0.0, 0.0, 1.0, -1.0], dtype=torch.float64)
    values = torch.tensor([0.2, 0.4, 0.5, 0.3], dtype=torch.float64)
    advantages, returns = gae(rewards, values, torch.tensor([0, 0, 0, 1]), gamma=0.9, gae_lambda=0.8)
    assert near(advantages, [0.4552, 0.41, 0.5, -1.3])
    assert near(returns, [0.6552, 0.81, 1.0, -1.0])


def test_gae_with_lambda_one_is_the_return_less_the_value():
    rewards = torch.tensor([0.0, 0.0, 2.0], dtype=torch.float64)
    values = torch.tensor([0.5, 0.7, 1.0], dtype=torch.float64)
    advantages, returns = gae(rewards, values, torch.zeros(3, dtype=torch.long), gamma=1.0, gae_lambda=1.0)
    assert returns.tolist() == [2.0, 2.0, 2.0] and near(advantages, [1.5, 1.3, 1.0])


def test_whitened_advantages_have_mean_0_and_spread_1():
    white = whiten(torch.tensor([1.0, 2.0, 3.0]))
    assert white.tolist() == pytest.approx([-1 / 1.0001, 0.0, 1 / 1.0001])


def test_value_loss_is_clipped_to_the_worse_side():
    values, old, returns = torch.tensor([1.0, 0.1]), torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0])
    assert value_loss(values, old, returns, None).tolist() == pytest.approx([0.0, 0.405])
    # held within 0.2 of the old value: 0.2 is 0.8 away from the return, although 1.0 was right
    assert value_loss(values, old, returns, 0.2).tolist() == pytest.approx([0.32, 0.405])


def test_explained_variance_by_hand():
    returns = torch.tensor([1.0, 2.0, 3.0, 4.0])  # variance 1.25
    assert explained_variance(returns, returns) == 1
    assert explained_variance(torch.full((4,), 7.0), returns) == 0  # a constant, however wrong
    # errors 0, 1, 0, 1: variance 0.25
    assert explained_variance(torch.tensor([1.0, 1.0, 3.0, 3.0]), returns) == pytest.approx(0.8)
    assert explained_variance(-returns, returns) == pytest.approx(1 - 4)
    assert explained_variance(returns, torch.ones(4)) == 0
