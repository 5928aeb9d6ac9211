"""Load a GGUF file again with transformers, and compare tokens and logits with those of the model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from whetstone.errors import UserError
from whetstone.model.hub import load_gguf
from whetstone.model.loading import quiet_transformers
from whetstone.model.verification import TEXTS

# Relative error of the logits. Measured: f16 5e-4, q8_0 2.3e-2 (SmolLM2-135M); 0 and 7e-3 (pebble).
BOUNDS = {"f16": 5e-3, "q8_0": 1e-1}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Logits of two models on the same tokens."""

    largest: float
    relative: float  # norm of the difference / norm of the logits


def compare_gguf(path: Path, model: Any, tokenizer: Any, kind: str) -> Difference:
    """The difference of a GGUF file from the float32 model it was written from; raises beyond the bound."""
    from transformers import AutoTokenizer

    with quiet_transformers():
        # transformers reads no key_length of Qwen 3 and takes 128.
        is_qwen3 = model.config.model_type == "qwen3"
        other = load_gguf(path, **({"head_dim": model.config.head_dim} if is_qwen3 else {}))
        other_tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    own, other_logits = [], []
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if other_tokenizer(text, add_special_tokens=False)["input_ids"] != ids:
            raise UserError(f"{path.name} reads text as other tokens: export without --gguf.")
        with torch.no_grad():
            own.append(model(torch.tensor([ids])).logits[0])
            other_logits.append(other(torch.tensor([ids])).logits[0])
    difference = logit_difference(torch.cat(other_logits), torch.cat(own))
    if not difference.relative < BOUNDS[kind]:
        raise UserError(
            f"{path.name} computes other logits (relative error {difference.relative:.1e}, more than "
            f"{BOUNDS[kind]:g}): export without --gguf."
        )
    return difference


def logit_difference(logits: torch.Tensor, own: torch.Tensor) -> Difference:
    gap = logits.float() - own.float()
    return Difference(largest=float(gap.abs().max()), relative=float(gap.norm() / own.float().norm()))
