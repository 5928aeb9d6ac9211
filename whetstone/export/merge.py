"""Load a trained model as one ordinary model: an adapter merged into its base, a 4-bit base dequantized."""

from pathlib import Path
from typing import Any

import torch

from whetstone.model.hub import base_and_adapter
from whetstone.model.loading import guarded, load_pretrained, quiet_transformers, try_tokenizer, verify_folder
from whetstone.model.lora import merge_lora
from whetstone.model.nf4 import dequantize_model, quantize_model
from whetstone.run.source import Source


def load_merged(source: Source) -> tuple[Any, Any, torch.dtype]:
    """Tokenizer, model, and the precision that the weights were stored in.

    Adapters are added in float32: the sum is rounded once, when it is saved.
    """
    base, adapter = base_and_adapter(source.model)
    for folder in (base, adapter):
        if folder is not None and Path(folder).is_dir():
            verify_folder(Path(folder))
    tokenizer, model = load_pretrained(base, "auto")
    stored = model.dtype
    if adapter is not None:
        if source.was_4bit:  # training added the adapter to the rounded matrices, so these are merged
            model.to(torch.bfloat16 if source.was_bf16 else torch.float32)
            quantize_model(model, torch.device("cpu"))
            dequantize_model(model)
        model = merge_lora(model.float(), adapter)
        tokenizer = _own_tokenizer(adapter) or tokenizer
    return tokenizer, model.requires_grad_(False).eval(), stored


def _own_tokenizer(adapter: str) -> Any:
    """The tokenizer beside an adapter, with the chat template of its run; None: there is none."""
    from transformers import AutoTokenizer

    if not (Path(adapter) / "tokenizer_config.json").is_file():
        return None
    try_tokenizer(Path(adapter))
    with quiet_transformers(), guarded(adapter):
        return AutoTokenizer.from_pretrained(adapter, trust_remote_code=False)
