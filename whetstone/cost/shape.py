"""The numbers of a model that memory and time depend on, without its weights.

They are counted on transformers' own modules, built on the meta device from the configuration in a folder, in
a table of well-known models, or on the hub.
"""

import contextlib
import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whetstone.errors import UserError, message_of
from whetstone.model.hub import HUB_TIMEOUT_S, SMOLLM2, base_and_adapter, cache_folder

# Model without owner and kind (-Instruct, -Base, -Coder, -Math) -> type, hidden size, layers, heads, heads of
# keys and values, MLP width, vocabulary, whether the output matrix is the embedding, and other settings.
KNOWN: dict[str, tuple[Any, ...]] = {
    "qwen2.5-0.5b": ("qwen2", 896, 24, 14, 2, 4864, 151936, True),
    "qwen2.5-1.5b": ("qwen2", 1536, 28, 12, 2, 8960, 151936, True),
    "qwen2.5-3b": ("qwen2", 2048, 36, 16, 2, 11008, 151936, True),
    "qwen2.5-7b": ("qwen2", 3584, 28, 28, 4, 18944, 152064, False),
    "qwen2.5-14b": ("qwen2", 5120, 48, 40, 8, 13824, 152064, False),
    "qwen2.5-32b": ("qwen2", 5120, 64, 40, 8, 27648, 152064, False),
    "qwen2.5-72b": ("qwen2", 8192, 80, 64, 8, 29568, 152064, False),
    "qwen3-0.6b": ("qwen3", 1024, 28, 16, 8, 3072, 151936, True, {"head_dim": 128}),
    "qwen3-1.7b": ("qwen3", 2048, 28, 16, 8, 6144, 151936, True, {"head_dim": 128}),
    "qwen3-4b": ("qwen3", 2560, 36, 32, 8, 9728, 151936, True, {"head_dim": 128}),
    "qwen3-8b": ("qwen3", 4096, 36, 32, 8, 12288, 151936, False, {"head_dim": 128}),
    "qwen3-14b": ("qwen3", 5120, 40, 40, 8, 17408, 151936, False, {"head_dim": 128}),
    "qwen3-32b": ("qwen3", 5120, 64, 64, 8, 25600, 151936, False, {"head_dim": 128}),
    "llama-3.2-1b": ("llama", 2048, 16, 32, 8, 8192, 128256, True),
    "llama-3.2-3b": ("llama", 3072, 28, 24, 8, 8192, 128256, True),
    "llama-3.1-8b": ("llama", 4096, 32, 32, 8, 14336, 128256, False),
    "llama-3.1-70b": ("llama", 8192, 80, 64, 8, 28672, 128256, False),
    "llama-3.3-70b": ("llama", 8192, 80, 64, 8, 28672, 128256, False),
    "mistral-7b": ("mistral", 4096, 32, 32, 8, 14336, 32768, False),
    "smollm2-135m": ("llama", 576, 30, 9, 3, 1536, 49152, True),
    "smollm2-360m": ("llama", 960, 32, 15, 5, 2560, 49152, True),
    "smollm2-1.7b": ("llama", 2048, 24, 32, 32, 8192, 49152, True),
    "smollm3-3b": ("smollm3", 2048, 36, 16, 4, 11008, 128256, True),
    "gemma-3-270m": ("gemma3_text", 640, 18, 4, 1, 2048, 262144, True, {"head_dim": 256}),
    "gemma-3-1b": ("gemma3_text", 1152, 26, 4, 1, 6912, 262144, True, {"head_dim": 256}),
    "phi-4": ("phi3", 5120, 40, 40, 10, 17920, 100352, False),
}
STATEFUL = ("linear_attention", "mamba", "conv", "mlp", "moe")  # layers without keys and values
KINDS = re.compile(r"-(instruct|base|coder|math|it|pt|chat|v0\.\d|2507|thinking)(?=-|$)")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Counts of weights, and sizes of what a token leaves behind in a layer."""

    name: str
    layers: int
    hidden: int
    inner: int  # width of an MLP; with experts, of those that a token uses
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    parameters: int
    active: int  # parameters that a token is multiplied by: without a separate embedding, and few experts
    experts: int  # weights of all experts, of which a token uses `expert_share`
    expert_share: float
    kv_bytes: int  # of the keys and values of a token in 16 bits
    linear: int  # weights of the linear layers in the decoder layers
    linear_sides: int  # inputs and outputs of these layers, added up: an adapter has lora_r times as many
    is_silu_gated: bool  # the MLPs are down(silu(gate x) * up x), which LoRA computes with less memory
    unsampled: str | None = None  # for what the native engine has no cache: transformers samples

    def weights_read(self, sequences: int) -> float:
        """Weights that a decode step reads: of many sequences some use any expert."""
        unused = 1 - self.expert_share
        return self.active + self.experts * (unused - unused**sequences)


def model_shape(name: str) -> ModelShape:
    """The shape of a folder, of a well-known model, or of a model on the hub."""
    return shape_of(name, _model_config(name))


def _model_config(name: str) -> Any:
    from huggingface_hub import HfApi
    from transformers import AutoConfig

    known = known_config(name)
    in_cache = name == SMOLLM2 and not (cache_folder() / SMOLLM2).is_dir()
    if known is not None and (in_cache or not Path(name).is_dir()):
        return known
    base, _ = base_and_adapter(name)
    try:
        with contextlib.suppress(OSError):  # neither a folder nor in the hub's cache
            return AutoConfig.from_pretrained(base, trust_remote_code=False, local_files_only=True)
        HfApi().model_info(base, timeout=HUB_TIMEOUT_S)  # transformers would try for half a minute
        return AutoConfig.from_pretrained(base, trust_remote_code=False)
    except Exception as error:  # whatever transformers and the hub raise
        raise UserError(
            f"The configuration of '{name}' can't be read ({message_of(error)}): give a folder with "
            "config.json, or a model that is known without the hub, such as Qwen/Qwen2.5-1.5B-Instruct."
        ) from None


def known_config(name: str) -> Any:
    """transformers' configuration of a well-known model; None: unknown."""
    short = name.lower().rpartition("/")[2]
    while (stripped := KINDS.sub("", short)) != short:
        short = stripped
    if short not in KNOWN:
        return None
    from transformers import AutoConfig

    kind, hidden, layers, heads, kv_heads, inner, vocabulary, tied, *others = KNOWN[short]
    return AutoConfig.for_model(
        kind,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        pad_token_id=None,
        **(others[0] if others else {}),
    )


@functools.cache
def _meta_device() -> Any:
    import torch

    return torch.device("meta")


def shape_of(name: str, config: Any) -> ModelShape:
    """The shape by transformers' configuration."""
    from torch import nn

    from whetstone.model.gated_lora import is_silu_mlp
    from whetstone.model.loading import model_class
    from whetstone.model.size import count_experts, num_active, num_parameters, unsampled_part, widest_layer

    try:
        with _meta_device():
            model: Any = model_class(config).from_config(config, trust_remote_code=False)
        model.tie_weights()
    except Exception as error:
        raise UserError(
            f"'{name}' is no causal language model that transformers can build ({message_of(error)}): "
            "choose another."
        ) from None
    text = config.get_text_config()
    layer = widest_layer(text)
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    used, number = count_experts(text)
    hidden = text.hidden_size
    width = getattr(text, "moe_intermediate_size", None) if number > 1 else None
    heads = layer.num_attention_heads
    kv_heads = getattr(layer, "num_key_value_heads", None) or heads
    head_dim = getattr(layer, "head_dim", None) or hidden // heads
    kv_numbers = 2 * kv_heads * head_dim
    if getattr(text, "kv_lora_rank", None):  # MLA caches a latent; keys are wider than values
        kv_numbers = text.kv_lora_rank + text.qk_rope_head_dim
        head_dim = (text.qk_head_dim + text.v_head_dim) // 2
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    return ModelShape(
        name=name,
        layers=text.num_hidden_layers,
        hidden=hidden,
        inner=used * (width or getattr(layer, "intermediate_size", None) or 4 * hidden),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=text.vocab_size,
        parameters=num_parameters(model),
        active=sum(num_active(model, text)),
        experts=experts,
        expert_share=used / number,
        kv_bytes=2 * kv_numbers * sum(kind not in STATEFUL for kind in kinds),
        linear=sum(layer.weight.numel() for layer in linear),
        linear_sides=sum(layer.in_features + layer.out_features for layer in linear),
        is_silu_gated=any(map(is_silu_mlp, model.modules())),
        unsampled=unsampled_part(text),
    )
