"""Switches of a model beside those of torch and peft."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from tests.conftest import make_policy
from whetstone.model.fused_lora import fuse_lora
from whetstone.model.policy import Policy

IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_without_its_adapter_a_model_is_its_base(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = make_policy("llama", tie_word_embeddings=False)
    base = logits(plain)
    config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0, **settings)
    policy = Policy(get_peft_model(plain.lm, config), plain.tokenizer, plain.device)
    fuse_lora(policy.layers)
    for parameter in policy.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    on = logits(policy)
    with policy.modes.without_adapter():
        off = logits(policy)
        with policy.model.disable_adapter():
            assert torch.equal(logits(policy), off)
    assert torch.equal(off, base) and (on - base).abs().max() > 0.1
    with pytest.raises(ZeroDivisionError), policy.modes.without_adapter():
        raise ZeroDivisionError
    assert torch.equal(logits(policy), on)
    assert all(parameter.requires_grad for parameter in policy.parameters())


def test_all_modules_train_or_none() -> None:
    policy = make_policy("qwen2")
    policy.modes.train()
    assert all(module.training for module in policy.model.modules())
    policy.modes.train(False)
    assert not any(module.training for module in policy.model.modules())


@torch.no_grad()
def logits(policy: Policy) -> Tensor:
    policy.set_attention("sdpa")
    return policy.model(input_ids=IDS, use_cache=False).logits
