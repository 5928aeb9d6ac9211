"""The value model."""

import pytest
import torch

from tests.conftest import make_policy
from tests.support.update import make_samples, updater_for
from whetstone.config import load
from whetstone.errors import UserError
from whetstone.update.packing import pack


def pass_of(updater, batch):
    """Bytes that a pass of the critic keeps for its gradient, and the gradient."""
    critic, kept = updater.critic, {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    updater.policy.modes.train()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        values = critic.values(batch, torch.zeros(0))
    gradients = torch.autograd.grad(values.square().sum(), list(critic.trunk.parameters()), allow_unused=True)
    weights = {parameter.data_ptr() for parameter in critic.parameters()}
    return sum(size for place, size in kept.items() if place not in weights), gradients


def test_a_critic_of_its_own_is_checkpointed_as_the_policy_is():
    """Otherwise `micro_batch_tokens: auto` saves no memory of its pass."""
    policy = make_policy("llama", num_hidden_layers=4)
    updater = updater_for(policy, advantage="gae", critic="model")
    torch.nn.init.normal_(updater.critic.head.weight)
    [batch] = pack(make_samples(policy), 1000)
    plain, expected = pass_of(updater, batch)
    policy.checkpoint_layers(2)
    half, gradients = pass_of(updater, batch)
    policy.checkpoint_layers(4)
    whole, _ = pass_of(updater, batch)
    assert whole < 0.2 * plain and whole < half < 0.7 * plain
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_critic_of_its_own_is_not_for_weights_of_4_bits():
    words = ["use_peft=true", "load_in_4bit=true", "advantage=gae"]
    assert load(None, [*words, "critic=head"]).config.model.load_in_4bit
    with pytest.raises(UserError, match="critic: model trains whole matrices: set critic: head"):
        load(None, [*words, "critic=model"])
