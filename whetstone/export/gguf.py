"""Write a model as GGUF, the format of llama.cpp: f16, or q8_0 (blocks of 32 weights in 8 bits).

Llama, Qwen 2 and Qwen 3 with plain RoPE. llama.cpp rotates pairs of neighbors where transformers rotates
halves, so the query and key rows of Llama are reordered. Norms and biases stay float32.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whetstone.errors import UserError
from whetstone.export.gguf_tokenizer import write_tokenizer
from whetstone.model.rounding import stochastic_round

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # model_type -> GGUF's name
TYPES = ("f16", "q8_0")
F16_MAX = 65504.0


def check_architecture(config: Any) -> None:
    """Raise where a model can't be written as GGUF with all that it computes."""
    name = config.model_type
    if name not in ARCHITECTURES:
        raise UserError(f"GGUF is written for Llama, Qwen2 and Qwen3, not for {name}: export without --gguf.")
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    reasons = {
        f"RoPE of the type {rope}": rope != "default",
        "sliding windows": bool(getattr(config, "use_sliding_window", False)),
        "biases": name != "qwen2" and bool(getattr(config, "attention_bias", False)),
        "biases in its MLP": bool(getattr(config, "mlp_bias", False)),
        f"the activation {config.hidden_act}": config.hidden_act != "silu",
    }
    for reason, applies in reasons.items():
        if applies:
            raise UserError(f"GGUF can't be written: this {name} model has {reason}. Export without --gguf.")


def write_gguf(
    path: Path, model: Any, tokenizer: Any, *, kind: str, name: str, is_merged: bool = False
) -> None:
    """Write weights, shape and tokenizer into one file; `kind` is f16 or q8_0.

    Weights into which an adapter was merged are rounded to f16 stochastically. In q8_0 the nearest is better:
    the base does not lie on its grid, so a small adapter is not lost.
    """
    from gguf import LlamaFileType

    check_architecture(model.config)
    writer = _writer(path, ARCHITECTURES[model.config.model_type])
    writer.add_name(name)
    writer.add_file_type(LlamaFileType.MOSTLY_F16 if kind == "f16" else LlamaFileType.MOSTLY_Q8_0)
    if kind == "q8_0":
        writer.add_quantization_version(2)
    _add_shape(writer, model.config)
    write_tokenizer(writer, tokenizer, model)
    try:
        tensors = dict(_tensors(model))
        for gguf_name, tensor in tensors.items():  # shapes first: tensors are converted one at a time
            shape, dtype, size = _stored(tuple(tensor.shape), kind)
            writer.add_tensor_info(gguf_name, shape, np.dtype(dtype), size, raw_dtype=_type(tensor, kind))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for gguf_name, tensor in tensors.items():
            if is_merged and _type(tensor, kind).name == "F16":
                tensor = stochastic_round(tensor.detach(), torch.float16)
            writer.write_tensor_data(_converted(gguf_name, tensor, model.config, kind))
    finally:
        writer.close()


def _writer(path: Path, architecture: str) -> Any:
    from gguf import GGUFValueType, GGUFWriter

    class Writer(GGUFWriter):
        """The package refuses empty arrays, which the format allows: a vocabulary without merges has one."""

        def _pack_val(self, val: Any, vtype: Any, add_vtype: bool, sub_type: Any = None) -> bytes:
            if vtype == GGUFValueType.ARRAY and sub_type is not None and len(val) == 0:
                return self._pack("I", vtype) + self._pack("I", sub_type) + self._pack("Q", 0)
            return super()._pack_val(val, vtype, add_vtype, sub_type)

    return Writer(path, architecture)


def _add_shape(writer: Any, config: Any) -> None:
    """Sizes, heads, RoPE and norm of the architecture."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_rope_dimension_count(head_dim)


def _tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """(GGUF's name, tensor); a tied output matrix is left out, as llama.cpp expects."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture = next(
        key for key, name in MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[model.config.model_type]
    )
    names = get_tensor_name_map(architecture, model.config.num_hidden_layers)
    for name, tensor in model.named_parameters():  # names a tied matrix once, as the embedding
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, f"GGUF has no name for {name}"
        yield gguf_name, tensor


def _type(tensor: Tensor, kind: str) -> Any:
    from gguf import GGMLQuantizationType

    if tensor.dim() == 1:
        return GGMLQuantizationType.F32
    fits = kind == "q8_0" and tensor.shape[-1] % 32 == 0
    return GGMLQuantizationType.Q8_0 if fits else GGMLQuantizationType.F16


def _stored(shape: tuple[int, ...], kind: str) -> tuple[tuple[int, ...], str, int]:
    """Shape, numpy's dtype and bytes of a tensor in the file."""
    if len(shape) == 1:
        return shape, "float32", 4 * shape[0]
    if kind == "q8_0" and shape[-1] % 32 == 0:
        row = shape[-1] // 32 * 34
        return (*shape[:-1], row), "uint8", shape[0] * row
    return shape, "float16", 2 * shape[0] * shape[-1]


def _converted(name: str, tensor: Tensor, config: Any, kind: str) -> np.ndarray:
    """A tensor as it lies in the file."""
    from gguf import quantize

    weights = tensor.detach().float().numpy()
    if config.model_type == "llama" and name.endswith((".attn_q.weight", ".attn_k.weight")):
        is_query = name.endswith(".attn_q.weight")
        weights = _interleave(weights, config.num_attention_heads if is_query else config.num_key_value_heads)
    stored = _type(tensor, kind)
    if stored.name == "F16" and np.abs(weights).max() > F16_MAX:
        raise UserError(f"{name} has values beyond {F16_MAX:g}, the largest of f16: use --gguf q8_0.")
    return quantize(np.ascontiguousarray(weights), stored)


def _interleave(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from (first half, second half) to neighboring pairs."""
    halves = weights.reshape(num_heads, 2, -1, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)
