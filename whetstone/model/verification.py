"""What two computations of the same logits are compared on, and how far apart rounding may take them."""

from typing import Any

import torch
from torch import Tensor

# Real text: on special tokens, which a model has hardly seen, bf16 may change the logits of SmolLM2 by 100 %.
TEXTS = (
    "Question: a train leaves at 9:40 and arrives at 11:05. How many minutes does it take?",
    "First 20 minutes to 10 o'clock, then 65 more: 20 + 65 = 85.",
    "The answer is \\boxed{85}.",
)
MAX_TOKENS = 64
FLOAT32_BOUND, HALF_BOUND, LARGEST_BOUND = 1e-3, 5e-2, 0.3


def text_tokens(tokenizer: Any, vocab_size: int, max_length: int | None) -> list[Tensor]:
    """The tokens of each text."""
    length = min(MAX_TOKENS, max_length or MAX_TOKENS)
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    return [torch.tensor(ids[:length]) % vocab_size for ids in rows]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def rounding_bound(dtype: torch.dtype, noise: float) -> float:
    """How far logits may be apart; `noise`: how far those of sdpa and eager attention are on the texts."""
    if dtype == torch.float32:
        return FLOAT32_BOUND
    return min(max(HALF_BOUND, 3 * noise), LARGEST_BOUND)
