"""The mathematics by hand: advantages, clipped losses and their gradients, KL, masks, token weights."""

import math

import pytest
import torch

from whetstone.algorithm.advantages import group_advantages
from whetstone.algorithm.kl import k3
from whetstone.algorithm.losses import LossInputs, policy_loss
from whetstone.algorithm.masks import off_policy_keep, sequence_mean
from whetstone.algorithm.reduce import token_weights
from whetstone.config.rooms import LossRoom


def test_group_advantages_by_hand():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    # first group: mean 0.5, deviation sqrt(4 * 0.25 / 3) = 0.57735; second: no spread, no advantage
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert torch.allclose(
        group_advantages(rewards, "group"),
        torch.tensor([[expected, -expected, -expected, expected], [0.0, 0.0, 0.0, 0.0]]),
    )
    assert group_advantages(rewards, "none").tolist() == [[0.5, -0.5, -0.5, 0.5], [0.0, 0.0, 0.0, 0.0]]
    # all eight: mean 1.25, squared deviations 2*0.0625 + 2*1.5625 + 4*0.5625 = 5.5
    assert group_advantages(rewards, "batch")[0, 0].item() == pytest.approx(0.5 / (math.sqrt(5.5 / 7) + 1e-4))


def test_a_group_of_one_has_no_advantage_and_no_nan():
    assert group_advantages(torch.tensor([[3.0], [1.0]]), "group").tolist() == [[0.0], [0.0]]


# Four tokens: ratios 1.5, 0.5, 1.1, 1.5 with advantages 1, -1, 2, -1.
RATIOS = torch.tensor([1.5, 0.5, 1.1, 1.5], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, -1.0, 2.0, -1.0], dtype=torch.float64)


def loss_and_gradient(config: LossRoom, reference=None, keep=None):
    old = torch.tensor([-1.0, -2.0, -0.5, -0.7], dtype=torch.float64)
    logprobs = (old + RATIOS.log()).requires_grad_()
    entropy = (logprobs * 0 + 1.3) + logprobs  # any function of the logprobs will do
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=old,
        advantages=ADVANTAGES,
        entropy=entropy,
        reference_logprobs=reference,
        keep=keep,
    )
    outputs = policy_loss(inputs, config)
    (gradient,) = torch.autograd.grad(outputs.loss.sum(), logprobs)
    return outputs, gradient


def test_clipped_loss_and_gradient_by_hand():
    outputs, gradient = loss_and_gradient(LossRoom(epsilon=0.2))
    # -min(rA, clip(r)A): token 1: -min(1.5, 1.2); 2: -min(-0.5, -0.8); 3: -2.2; 4: -min(-1.5, -1.2)
    assert torch.allclose(outputs.loss, torch.tensor([-1.2, 0.8, -2.2, 1.5], dtype=torch.float64))
    # clipped tokens have no gradient; the others have -rA
    assert torch.allclose(gradient, torch.tensor([0.0, 0.0, -2.2, 1.5], dtype=torch.float64))
    assert outputs.clipped.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_clip_higher_and_two_sided_clip():
    outputs, gradient = loss_and_gradient(LossRoom(epsilon=0.2, epsilon_high=0.6))
    assert outputs.loss[0].item() == pytest.approx(-1.5) and gradient[0].item() == pytest.approx(-1.5)
    outputs, gradient = loss_and_gradient(LossRoom(epsilon=0.2, delta=1.3))
    assert outputs.loss[3].item() == pytest.approx(1.3) and gradient[3].item() == 0.0


def test_kl_penalty_and_its_gradient():
    reference = torch.tensor(
        [-1.0, -2.0, -0.5, -0.7], dtype=torch.float64
    )  # d = reference - logprob = -log ratio
    outputs, gradient = loss_and_gradient(LossRoom(epsilon=0.2, beta=0.1), reference=reference)
    expected = [1 / r + math.log(r) - 1 for r in RATIOS.tolist()]
    assert outputs.kl is not None and torch.allclose(outputs.kl, torch.tensor(expected, dtype=torch.float64))
    # d/dlogp of exp(d) - d - 1 is 1 - exp(d) = 1 - 1/r
    assert gradient[0].item() == pytest.approx(0.1 * (1 - 1 / 1.5))
    assert (k3(torch.zeros(3), torch.tensor([-1.0, 0.0, 2.0])) >= 0).all()


def test_entropy_bonus_and_mask():
    outputs, _ = loss_and_gradient(LossRoom(epsilon=0.2, entropy_coef=0.5))
    plain, _ = loss_and_gradient(LossRoom(epsilon=0.2))
    entropy = 1.3 + torch.tensor([-1.0, -2.0, -0.5, -0.7], dtype=torch.float64) + RATIOS.log()
    assert torch.allclose(outputs.loss, plain.loss - 0.5 * entropy)
    keep = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    outputs, gradient = loss_and_gradient(LossRoom(epsilon=0.2), keep=keep)
    assert outputs.loss[2:].tolist() == [0.0, 0.0] and gradient[2:].tolist() == [0.0, 0.0]


def test_off_policy_rule_is_signed():
    advantages = torch.tensor([1.0, -1.0, -1.0, -1.0])
    drift = torch.tensor([5.0, 0.3, 0.1, -5.0])  # a bad sequence whose probability rose is kept, as in TRL
    assert off_policy_keep(advantages, drift, 0.2).tolist() == [1.0, 0.0, 1.0, 1.0]


def test_sequence_mean():
    means = sequence_mean(torch.tensor([1.0, 3.0, 10.0]), torch.tensor([0, 0, 2]), 3)
    assert means.tolist() == [2.0, 0.0, 10.0]


def test_token_weights_by_hand():
    lengths, keep = torch.tensor([2, 6, 4]), torch.tensor([1.0, 1.0, 0.0])
    weigh = lambda kind: token_weights(lengths, keep, loss_type=kind, max_length=10)  # noqa: E731
    assert torch.allclose(weigh("grpo"), torch.tensor([1 / 6, 1 / 18, 0.0]))
    assert torch.allclose(weigh("dapo"), torch.tensor([1 / 8, 1 / 8, 0.0]))
    assert torch.allclose(weigh("bnpo"), weigh("dapo"))
    assert torch.allclose(weigh("dr_grpo"), torch.tensor([1 / 30, 1 / 30, 0.0]))
