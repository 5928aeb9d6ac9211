"""Counts of a model's weights: all of them, and those that a token is multiplied by."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from whetstone.model.nf4 import Nf4Linear

CACHED_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}  # of config.layer_types
UNSAMPLED = {
    "deepseek_v3": "latent attention",
    "gpt_oss": "attention sinks",
    "stablelm": "its attention",
    "gpt2": "its attention",
}
GENERATE_STEP_S = 0.067  # of a token of all sequences: Qwen3.5-2B on an H200 (LFM2-1.2B: 0.033)
GENERATE = "by transformers' generate, about 4k tokens/s with 256 sequences on an H200"


def num_parameters(model: nn.Module) -> int:
    """Weights of a model; 4-bit matrices count as the matrices that they stand for."""
    return sum(number for _, number, _ in _weights(model))


def num_active(model: nn.Module, config: Any) -> tuple[int, int]:
    """Weights that a token is multiplied by, trained and frozen; `config` is that of the text model.

    A weight that only an embedding has is looked up, not multiplied; an output matrix that is the embedding
    counts. Of the experts count as many as a token uses.
    """
    multiplied = {
        id(parameter)
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    lookups = {name for name, parameter in model.named_parameters() if id(parameter) not in multiplied}
    used, number_of_experts = count_experts(config)
    trained = frozen = 0.0
    for name, number, is_trained in _weights(model):
        if name in lookups:
            continue
        share = used / number_of_experts if ".experts." in name else 1.0
        if is_trained:
            trained += share * number
        else:
            frozen += share * number
    return round(trained), round(frozen)


def count_experts(config: Any) -> tuple[int, int]:
    """Experts that a token uses, and all of them; 1 and 1 for a plain model."""
    number = next(
        (
            value
            for key in ("num_experts", "num_local_experts", "n_routed_experts")
            if isinstance(value := getattr(config, key, None), int) and value > 1
        ),
        1,
    )
    used = getattr(config, "num_experts_per_tok", None) if number > 1 else 1
    return (used if isinstance(used, int) and used > 0 else 1), number


def widest_layer(config: Any) -> Any:
    """The settings of the layer with the most keys and values; `config` itself where all layers are alike.

    Reading what differs between layers (Gemma 4: head_dim) from the configuration of the model is an error.
    """
    if not getattr(config, "is_heterogeneous", False):
        return config
    return max(config.per_layer_config, key=lambda layer: layer.num_key_value_heads * layer.head_dim)


def layers_of(trunk: Any) -> Any:
    """The decoder layers, under whichever name."""
    text = getattr(trunk, "language_model", trunk)  # beside a vision tower
    lists = [module for module in text.modules() if isinstance(module, nn.ModuleList)]
    return getattr(text, "layers", None) or max(lists, key=len)


def unsampled_part(config: Any) -> str | None:
    """What the native engine has no cache for, by the configuration of the text model; None: nothing."""
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - CACHED_KINDS)
    if kinds:
        return f"{kinds[0]} layers"
    if getattr(config, "is_heterogeneous", False) or getattr(config, "global_head_dim", None):
        return "keys of different sizes"
    return UNSAMPLED.get(config.model_type)


def _weights(model: nn.Module) -> Iterator[tuple[str, int, bool]]:
    """Name, number of weights and whether they are trained."""
    for name, parameter in model.named_parameters():
        yield name, parameter.numel(), parameter.requires_grad
    for name, layer in model.named_modules():
        if isinstance(layer, Nf4Linear):
            stored = layer.codes.numel() + layer.scales.numel()
            yield f"{name}.weight", layer.in_features * layer.out_features - stored, False


def longrope_length(config: Any) -> int | None:
    """How long a sequence may be for the short factors of LongRoPE (Phi-3.5, Phi-4-mini).

    transformers takes the long factors for a batch with a longer one: for the tokens that were sampled with
    the short ones before, and for all other sequences.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    return rope["original_max_position_embeddings"] if rope.get("rope_type") == "longrope" else None
