"""Weights that a token is multiplied by, counted by hand and by the operations that torch runs."""

from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from tests.conftest import ARCHITECTURES, TINY, make_policy
from whetstone.config.sections import ModelConfig
from whetstone.model.lora import add_lora
from whetstone.model.nf4 import quantize_model
from whetstone.model.size import count_experts, num_active, num_parameters

HIDDEN, INNER, VOCABULARY, LAYERS, R = 32, 64, 97, 2, 4
ATTENTION = 2 * HIDDEN * 32 + 2 * HIDDEN * 16  # queries and output, keys and values
MLP = 3 * HIDDEN * INNER
NORMS = (2 * LAYERS + 1) * HIDDEN
PRODUCTS = LAYERS * (ATTENTION + MLP) + VOCABULARY * HIDDEN


@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_that_is_looked_up_does_not_count(tied: bool) -> None:
    policy = make_policy("llama", tie_word_embeddings=tied)
    assert num_active(policy.model, policy.config) == (PRODUCTS + NORMS, 0)
    assert num_parameters(policy.model) == PRODUCTS + NORMS + (0 if tied else VOCABULARY * HIDDEN)


@pytest.mark.parametrize("in_4_bits", [False, True])
def test_adapters_are_trained_and_the_rest_is_frozen(in_4_bits: bool) -> None:
    policy = make_policy("llama", hidden_size=64, head_dim=16, intermediate_size=128)
    plain = num_active(policy.model, policy.config)[0]
    if in_4_bits:
        quantize_model(policy.lm, torch.device("cpu"))
    settings = ModelConfig(use_peft=True, lora_r=R, load_in_4bit=in_4_bits)
    model = add_lora(policy.lm, settings, None)
    sides = LAYERS * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    assert num_active(model, policy.config) == (R * sides, plain)


def test_of_eight_experts_a_token_uses_two() -> None:
    experts: Any = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = transformers.Qwen3MoeConfig(**{**TINY, **experts})
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert count_experts(config) == (2, 8)
    unused = LAYERS * 6 * 3 * HIDDEN * 16
    assert sum(num_active(model, config)) == num_parameters(model) - unused - VOCABULARY * HIDDEN


@pytest.mark.parametrize("architecture", ["llama", "smollm", "qwen2", "gemma3"])
def test_torch_counts_as_many_operations(architecture: str) -> None:
    """Twice the active weights for a token; norms and biases are no products, attention is taken off."""
    name, settings = ARCHITECTURES[architecture]
    config = getattr(transformers, name)(**{**TINY, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.arange(3, 13)[None]
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(ids)
    operations = counter.get_flop_counts()["Global"]
    products = operations[torch.ops.aten.mm] + operations.get(torch.ops.aten.addmm, 0)
    small = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert products == 2 * ids.numel() * (sum(num_active(model, config)) - small)
