"""The check of the packed forward pass at the start: no false alarm by rounding, no wrong pass accepted."""

import pytest
import torch

from tests.conftest import make_policy
from whetstone.errors import UserError
from whetstone.model.attention import NAME


def with_large_key_biases(policy):
    """Qwen2.5's trained key biases reach hundreds; random ones are 0."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in policy.lm.model.layers:
            for projection, scale in ((layer.self_attn.k_proj, 100.0), (layer.self_attn.q_proj, 12.0)):
                projection.bias.copy_(scale * torch.randn(projection.bias.shape, generator=generator))
    return policy


def test_large_key_biases_in_bf16_are_not_refused():
    policy = with_large_key_biases(make_policy("qwen2", num_hidden_layers=6))
    policy.verify()
    policy.model.bfloat16()
    policy.verify()
    assert policy.lm.config._attn_implementation == NAME


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_forward_pass_is_refused(dtype, monkeypatch):
    policy = make_policy("qwen2")
    policy.model.to(dtype)
    hidden = policy.hidden
    monkeypatch.setattr(
        policy, "hidden", lambda ids, positions, attend: hidden(ids, torch.zeros_like(positions), attend)
    )
    with pytest.raises(UserError, match="Qwen2ForCausalLM"):
        policy.verify()
