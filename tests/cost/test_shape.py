"""Shapes of models without weights: counts that their cards give, and those of real modules."""

from typing import Any

import pytest
import torch
import transformers

from tests.conftest import make_policy
from whetstone.cost.shape import known_config, model_shape, shape_of
from whetstone.errors import UserError
from whetstone.model.policy import load_policy
from whetstone.model.size import num_parameters


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes"),
    [
        ("Qwen/Qwen2.5-Coder-1.5B-Instruct", 1_543_714_304, 2 * 28 * 2 * 128 * 2),
        ("Qwen/Qwen2.5-7B", 7_615_616_512, 2 * 28 * 4 * 128 * 2),
        ("unsloth/Llama-3.2-1B-Instruct", 1_235_814_400, 2 * 16 * 8 * 64 * 2),
        ("meta-llama/Llama-3.1-70B-Instruct", 70_553_706_496, 2 * 80 * 8 * 128 * 2),
        ("Qwen/Qwen3-4B-Instruct-2507", 4_022_468_096, 2 * 36 * 8 * 128 * 2),
        ("google/gemma-3-270m-it", 268_098_176, 2 * 18 * 1 * 256 * 2),
    ],
)
def test_known_models_have_the_parameters_of_their_cards(name: str, parameters: int, kv_bytes: int) -> None:
    shape = model_shape(name)
    assert (shape.parameters, shape.kv_bytes) == (parameters, kv_bytes)


@pytest.mark.parametrize(
    ("name", "is_gated"),
    [("qwen2.5-1.5b", True), ("smollm2-135m", True), ("gemma-3-1b", False), ("phi-4", False)],
)
def test_which_mlps_lora_computes_with_less_memory(name: str, is_gated: bool) -> None:
    """Gemma's activation is GELU; Phi's gate and up are one matrix."""
    assert model_shape(name).is_silu_gated == is_gated


def test_a_folder_is_counted_like_its_loaded_model() -> None:
    from whetstone.config.sections import ModelConfig

    policy, shape = load_policy(ModelConfig(device="cpu", use_peft=True, lora_r=8)), model_shape("pebble")
    adapter = sum(p.numel() for p in policy.parameters())
    assert adapter == 8 * shape.linear_sides
    assert shape.parameters == num_parameters(policy.model) - adapter
    assert shape.layers == len(policy.layers) and shape.head_dim == policy.head_dim


def test_no_token_is_multiplied_by_a_separate_embedding() -> None:
    config = make_policy("llama").lm.config
    one = shape_of("one", config)
    config.tie_word_embeddings = not config.tie_word_embeddings
    other = shape_of("other", config)
    assert abs(one.parameters - other.parameters) == config.vocab_size * config.hidden_size
    assert one.active == other.active


def test_a_token_uses_few_experts() -> None:
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    settings: Any = {**size, **experts, "head_dim": 8, "vocab_size": 100}
    config = transformers.Qwen3MoeConfig(**settings)
    shape = shape_of("mixture", config)
    each = 3 * 32 * 16  # gate, up and down of one expert
    separate = 0 if config.tie_word_embeddings else 100 * 32
    assert shape.parameters - shape.active == 2 * 6 * each + separate
    assert shape.inner == 2 * 16
    # A decode step of one sequence reads 2 of 8 experts a layer, of many nearly all: 8 (1 - 0.75^n).
    assert shape.weights_read(1) == shape.active
    assert shape.weights_read(3) - shape.active == pytest.approx(2 * (8 * (1 - 0.75**3) - 2) * each)
    assert shape.weights_read(999) == pytest.approx(shape.parameters - separate)


TINY = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 100}
MLA = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 12, "v_head_dim": 6}
HYBRID = {"head_dim": 8, "num_key_value_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("deepseek_v3", {**MLA, "num_key_value_heads": 4, "first_k_dense_replace": 4}),
        ("qwen3_5_text", {**HYBRID, "linear_num_key_heads": 2, "linear_num_value_heads": 2}),
        ("lfm2", {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention", "conv", "conv"]}),
        ("qwen3", {"head_dim": 16, "num_key_value_heads": 2}),
    ],
)
def test_keys_and_values_are_those_of_the_cache_of_transformers(kind: str, settings: dict[str, Any]) -> None:
    config = transformers.AutoConfig.for_model(kind, **TINY, intermediate_size=48, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    cache = model(torch.arange(10)[None], use_cache=True).past_key_values
    held = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    numbers = sum(layer.keys.numel() + layer.values.numel() for layer in held)
    assert shape_of(kind, config).kv_bytes == 2 * numbers / 10


def test_unknown_models_are_refused_with_what_to_give() -> None:
    assert known_config("somebody/else-9b") is None
    with pytest.raises(UserError, match="somebody/else-9b"):
        model_shape("somebody/else-9b")
