"""transformers' own `generate` as an engine, for comparisons and architectures that the native one can't run.

Uses the policy's weights in place. A sample depends on its own seed, not on its batch: its random numbers are
those of the native engine (`seeds.uniforms`).
"""

import copy
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

from whetstone import seeds
from whetstone.engines.base import EngineBase, GenerationOutput, Request, SamplingParams
from whetstone.engines.native.cpu import sample
from whetstone.errors import UserError
from whetstone.model.policy import Policy
from whetstone.types import Finish


class HFEngine(EngineBase):
    def __init__(self, policy: Policy, max_batch: int, attention: str | None):
        super().__init__(policy)
        self.max_batch = max_batch
        self.attention = attention or policy.original_attention
        try:
            policy.set_attention(self.attention)
        except (ImportError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"attn_implementation '{self.attention}' can't be used ({reason}): set sdpa or eager."
            ) from None
        finally:
            policy.restore_attention()

    def generate(self, requests: list[Request], sampling: SamplingParams) -> Iterator[GenerationOutput]:
        groups: dict[SamplingParams, list[tuple[int, int]]] = {}
        for r, request in enumerate(requests):
            groups.setdefault(request.params(sampling), []).extend((r, s) for s in range(len(request.seeds)))
        for params, samples in groups.items():
            for start in range(0, len(samples), self.max_batch):
                yield from self._generate(requests, samples[start : start + self.max_batch], params)

    def _generate(
        self, requests: list[Request], samples: list[tuple[int, int]], sampling: SamplingParams
    ) -> Iterator[GenerationOutput]:
        prompts = [requests[r].prompt_ids for r, _ in samples]
        limits = [requests[r].limit(s, sampling) for r, s in samples]
        width = max(len(prompt) for prompt in prompts)
        pad = self.policy.tokenizer.pad_token_id
        token_ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        stops = sampling.stop_ids(self.policy.stop_token_ids)
        self.policy.model.eval()
        self.policy.set_attention(self.attention)
        uniforms = [seeds.uniforms(requests[r].seeds[s], 0, max(limits)) for r, s in samples]
        sampler = _Sampler(torch.tensor(np.stack(uniforms), device=self.policy.device), sampling)
        settings = GenerationConfig(
            do_sample=False,  # _Sampler decides, and generate takes what it leaves
            max_new_tokens=max(limits),
            eos_token_id=stops or None,
            pad_token_id=pad,
        )
        # The model's generation settings would fill what is None (repetition_penalty, suppress_tokens). A
        # shallow copy has none; the model itself keeps them, since checkpoints are written meanwhile.
        bare = copy.copy(self.policy.lm)
        bare.generation_config = GenerationConfig()
        try:
            with torch.inference_mode():
                sequences = bare.generate(
                    input_ids=token_ids.to(self.policy.device),
                    attention_mask=mask.to(self.policy.device),
                    generation_config=settings,
                    logits_processor=LogitsProcessorList([*_filters(sampling), sampler]),
                )
        finally:
            self.policy.restore_attention()
        logprobs = torch.stack(sampler.logprobs, dim=1).tolist()
        rows = zip(samples, limits, sequences[:, width:].tolist(), logprobs, strict=True)
        for (r, s), limit, tokens, row in rows:
            end = next((i + 1 for i, token in enumerate(tokens[:limit]) if token in stops), None)
            finish = Finish.LENGTH if end is None else Finish.STOP
            yield self.output(r, s, tokens[: end or limit], row[: end or limit], finish)


def _filters(sampling: SamplingParams) -> list[LogitsProcessor]:
    """transformers' own temperature and filters, in its order; none for greedy sampling."""
    if sampling.temperature == 0:
        return []
    filters: list[LogitsProcessor] = [logits_process.TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        filters.append(logits_process.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        filters.append(logits_process.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        filters.append(logits_process.MinPLogitsWarper(sampling.min_p))
    return filters


class _Sampler(LogitsProcessor):
    """The last filter: leaves the sampled token and keeps its logprob."""

    def __init__(self, uniforms: Tensor, sampling: SamplingParams):
        self.uniforms = uniforms  # [B, tokens]
        self.params = SamplingParams(max_tokens=1, temperature=float(sampling.temperature > 0))
        self.logprobs: list[Tensor] = []  # [B] for every token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        tokens, logprobs = sample(scores, self.uniforms[:, len(self.logprobs)], self.params)
        self.logprobs.append(logprobs)
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens[:, None], 0.0)
