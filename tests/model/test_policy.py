"""The check of the packed forward pass at the start: no false alarm by rounding, no wrong pass accepted."""

from types import SimpleNamespace

import pytest
import torch

from tests.conftest import Characters, make_policy
from whetstone.config import build
from whetstone.errors import UserError
from whetstone.model.attention import NAME
from whetstone.model.lora import add_lora
from whetstone.model.policy import Policy
from whetstone.model.verification import perturbed_embeddings, rounding_bound


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
def test_a_wrong_packed_pass_is_not_used(dtype, monkeypatch, caplog):
    policy = make_policy("qwen2")
    policy.model.to(dtype)
    hidden = policy.hidden
    monkeypatch.setattr(
        policy, "hidden", lambda ids, positions, attend: hidden(ids, torch.zeros_like(positions), attend)
    )
    policy.verify()
    assert not policy.is_packed and policy.lm.config._attn_implementation == policy.original_attention
    assert "Qwen2ForCausalLM" in caplog.text


def test_logits_that_differ_even_on_padded_rows_are_refused(monkeypatch):
    policy = make_policy("qwen2")
    head = policy.head
    monkeypatch.setattr(policy, "head", lambda hidden: 2 * head(hidden))
    with pytest.raises(UserError, match="Qwen2ForCausalLM"):
        policy.verify()


def test_dropout_of_the_model_is_off_and_of_the_adapter_on():
    model = make_policy("qwen2", attention_dropout=0.1).model
    assert not any(getattr(module, "attention_dropout", 0.0) for module in model.modules())
    settings = build({"use_peft": True, "lora_r": 4, "lora_dropout": 0.2}).model
    policy = Policy(add_lora(model, settings, None), Characters(), torch.device("cpu"))
    rates = {module.p for module in policy.model.modules() if isinstance(module, torch.nn.Dropout)}
    assert rates == {0.2}


def test_the_bound_follows_the_noise_of_half_precision():
    bounds = [rounding_bound(torch.bfloat16, noise) for noise in (0.0, 0.01, 0.04, 1.0)]
    assert bounds == [0.05, 0.05, pytest.approx(0.12), 0.3]
    assert rounding_bound(torch.float32, 1.0) == 1e-3
    policy = with_large_key_biases(make_policy("qwen2", num_hidden_layers=6))
    policy.verify()
    assert policy.logit_noise == 0.0
    policy.model.bfloat16()
    policy.verify()
    assert 1e-3 < policy.logit_noise < 0.05
    assert policy.copy().logit_noise == policy.logit_noise


@pytest.mark.parametrize(("dtype", "step"), [(torch.float32, 2**-24), (torch.bfloat16, 2**-8)])
def test_embeddings_are_perturbed_by_one_rounding(dtype, step):
    embedding = make_policy().lm.get_input_embeddings().to(dtype)
    with torch.no_grad():
        embedding.weight.fill_(1.5)  # between two powers of two: the next numbers are 2 steps apart
        with perturbed_embeddings(SimpleNamespace(get_input_embeddings=lambda: embedding)):
            perturbed = embedding(torch.arange(20))
        assert set(perturbed.unique().tolist()) <= {1.5 - 2 * step, 1.5, 1.5 + 2 * step}
        assert len(perturbed.unique()) >= 2
        assert embedding(torch.arange(20)).unique().tolist() == [1.5]
