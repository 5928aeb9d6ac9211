"""What two computations of the same logits are compared on, and how far apart rounding may take them."""

import contextlib
from collections.abc import Iterator
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


@contextlib.contextmanager
def perturbed_embeddings(model: Any) -> Iterator[None]:
    """Inside, token embeddings are off by a rounding each. The logits then are by about what two correct
    computations differ: 0.02 for SmolLM2 in bf16, 0.09 for Gemma-3-270M, 0.01 for Qwen2.5-Coder-1.5B.
    """

    def perturb(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        signs = 2 * torch.randint(0, 2, output.shape, generator=generator) - 1
        step = torch.finfo(output.dtype).eps / 2
        return (output.float() * (1 + step * signs.to(output.device))).to(output.dtype)

    hook = model.get_input_embeddings().register_forward_hook(perturb)
    try:
        yield
    finally:
        hook.remove()


def rounding_bound(dtype: torch.dtype, noise: float) -> float:
    """How far logits may be apart; `noise`: how far they are with `perturbed_embeddings`."""
    if dtype == torch.float32:
        return FLOAT32_BOUND
    return min(max(HALF_BOUND, 3 * noise), LARGEST_BOUND)
