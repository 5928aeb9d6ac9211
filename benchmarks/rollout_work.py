"""The work that rollout engines are compared on: shapes of models, prompts, lengths, and the memory floor.

Everyone gets the same prompts and the same number of tokens for every sequence: `full` lets all of them run
to the end, `ragged` draws lengths from a lognormal distribution, `long` is 8 sequences of 16 k, `klong` has
the lengths of the recipe klong: prompts with a common prefix and short answers. Weights are random: speed
does not depend on them. Nothing is run here.
"""

import functools
import math
from dataclasses import asdict, dataclass

import torch

# hidden, layers, heads, heads of keys and values, intermediate: Qwen2.5's shapes
SIZES = {
    "0.5b": (896, 24, 14, 2, 4864),
    "1.5b": (1536, 28, 12, 2, 8960),
    "3b": (2048, 36, 16, 2, 11008),
}
LARGER = {"7b": (3584, 28, 28, 4, 18944)}  # for memory.py
EXPERTS = {"8b-a1b": (2048, 12, 32, 4, 768)}  # 12 of the 48 layers of Qwen3-30B-A3B: 8 of 128 experts a token
NUM_EXPERTS, EXPERTS_PER_TOKEN = 128, 8
VOCABULARY = 151936
GROUP = 8
NEW_TOKENS = 512
LONG_PROMPT = 15_872
KLONG_SHARED, KLONG_OWN, KLONG_ANSWER = 367, (36, 66), (11, 56)  # tokens, about those of Qwen2.5's tokenizer


@dataclass(frozen=True)
class Work:
    size: str
    num_sequences: int
    shape: str  # full, ragged, long or klong
    new_tokens: int = NEW_TOKENS

    @property
    def group(self) -> int:
        return {"long": 1, "klong": 16}.get(self.shape, GROUP)

    def prompts(self) -> list[list[int]]:
        """One prompt for each group."""
        return _prompts(self)

    def lengths(self) -> list[int]:
        """New tokens of every sequence, group after group."""
        return _lengths(self)

    def floor_s(self, bytes_per_s: float) -> float:
        """Seconds that reading weights and all keys and values once a step takes at the least.

        A batch uses every expert.
        """
        hidden, layers, heads, kv_heads, inner = {**SIZES, **EXPERTS}[self.size]
        width = 128 if self.size in EXPERTS else hidden // heads
        experts = NUM_EXPERTS if self.size in EXPERTS else 1
        block = hidden * (2 * heads + 2 * kv_heads) * width + experts * 3 * hidden * inner
        weights = 2 * (layers * block + VOCABULARY * hidden)
        per_token = 2 * 2 * layers * kv_heads * width
        prompts = [len(prompt) for prompt in self.prompts() for _ in range(self.group)]
        steps = max(self.lengths())
        cached = sum(
            prompt * length + length * (length - 1) // 2
            for prompt, length in zip(prompts, self.lengths(), strict=True)
        )
        return (steps * weights + per_token * cached) / bytes_per_s

    def row(self) -> dict:
        return {name: value for name, value in asdict(self).items() if name != "new_tokens"}


def works_of(size: str) -> list[Work]:
    works = [Work(size, number, shape) for number in (256, 1024) for shape in ("full", "ragged")]
    return works + ([Work(size, 8, "long"), Work(size, 512, "klong")] if size == "1.5b" else [])


def model_config(size: str):
    from transformers import Qwen2Config, Qwen3MoeConfig

    hidden, layers, heads, kv_heads, inner = {**SIZES, **LARGER, **EXPERTS}[size]
    if size in EXPERTS:
        return Qwen3MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=128,  # pyright: ignore[reportCallIssue]
            num_experts=NUM_EXPERTS,
            num_experts_per_tok=EXPERTS_PER_TOKEN,
            norm_topk_prob=True,
            moe_intermediate_size=inner,
            max_position_embeddings=32768,
            bos_token_id=1,
            eos_token_id=2,
            architectures=["Qwen3MoeForCausalLM"],
            dtype="bfloat16",
        )
    return Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        max_position_embeddings=32768,
        tie_word_embeddings=size in SIZES,
        bos_token_id=1,
        eos_token_id=2,
        architectures=["Qwen2ForCausalLM"],
        dtype="bfloat16",
    )


# Made once: the work is no part of anybody's time.
@functools.cache
def _prompts(work: Work) -> list[list[int]]:
    generator = torch.Generator().manual_seed(work.num_sequences)
    ranges = {"long": (LONG_PROMPT, LONG_PROMPT), "klong": KLONG_OWN}
    low, high = ranges.get(work.shape, (128, 256))
    num_shared = KLONG_SHARED if work.shape == "klong" else 0
    shared = torch.randint(5, VOCABULARY, (num_shared,), generator=generator).tolist()
    prompts = []
    for _ in range(work.num_sequences // work.group):
        length = int(torch.randint(low, high + 1, (), generator=generator))
        prompts.append(shared + torch.randint(5, VOCABULARY, (length,), generator=generator).tolist())
    return prompts


@functools.cache
def _lengths(work: Work) -> list[int]:
    generator = torch.Generator().manual_seed(1)
    if work.shape == "klong":
        low, high = KLONG_ANSWER
        return torch.randint(low, high + 1, (work.num_sequences,), generator=generator).tolist()
    if work.shape != "ragged":
        return [work.new_tokens] * work.num_sequences
    drawn = torch.randn(work.num_sequences, generator=generator).mul(0.7).add(math.log(160)).exp()
    return [int(length) for length in drawn.clamp(8, work.new_tokens)]
