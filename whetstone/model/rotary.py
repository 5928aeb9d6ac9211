"""Rotary embeddings whose frequencies depend on the length of a sequence."""

from typing import Any


def longrope_length(config: Any) -> int | None:
    """How long a sequence may be for the short factors of LongRoPE (Phi-3.5, Phi-4-mini).

    transformers takes the long factors for a batch with a longer one: for the tokens that were sampled with
    the short ones before, and for all other sequences.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    return rope["original_max_position_embeddings"] if rope.get("rope_type") == "longrope" else None
