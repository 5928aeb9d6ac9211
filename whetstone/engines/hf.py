"""transformers' own `generate` as an engine: slow, and right by reputation; for architectures and
comparisons.

Uses the policy's weights in place. Every sample has its own seed, but not its own random numbers per token: a
sample is repeatable for the same batch of requests, which is all that resuming needs. Draws from a generator
of its own, never torch's global one, which belongs to the update.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from whetstone import seeds
from whetstone.engines.base import GenerationOutput, Request, SamplingParams
from whetstone.errors import UserError
from whetstone.model.attention import NAME
from whetstone.model.policy import Policy
from whetstone.types import Completion, Finish


class HFEngine:
    def __init__(self, policy: Policy, max_batch: int, attention: str | None):
        self.policy = policy
        self.max_batch = max_batch
        self.attention = attention or policy.original_attention
        self.policy_version = 0
        try:
            policy.set_attention(self.attention)
        except (ImportError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"attn_implementation '{self.attention}' can't be used here ({reason}): leave it out, or "
                "set it to sdpa or eager."
            ) from None
        finally:
            policy.set_attention(NAME)

    def generate(self, requests: list[Request], sampling: SamplingParams) -> Iterator[GenerationOutput]:
        samples = [(r, s) for r, request in enumerate(requests) for s in range(len(request.seeds))]
        for start in range(0, len(samples), self.max_batch):
            chosen = samples[start : start + self.max_batch]
            yield from self._generate(requests, chosen, sampling)

    def _generate(
        self, requests: list[Request], chosen: list[tuple[int, int]], sampling: SamplingParams
    ) -> list[GenerationOutput]:
        prompts = [requests[r].prompt_ids for r, _ in chosen]
        width = max(len(prompt) for prompt in prompts)
        pad = self.policy.tokenizer.pad_token_id
        token_ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        self.policy.model.eval()
        self.policy.set_attention(self.attention)
        generator = torch.Generator(self.policy.device)
        generator.manual_seed(seeds.seed(*[requests[r].seeds[s] for r, s in chosen]))
        sampler = _Sampler(generator if sampling.temperature > 0 else None)
        try:
            with torch.inference_mode():
                sequences = self.policy.model.generate(
                    input_ids=token_ids.to(self.policy.device),
                    attention_mask=mask.to(self.policy.device),
                    generation_config=self._settings(sampling, pad),
                    logits_processor=LogitsProcessorList([*_filters(sampling), sampler]),
                )
        finally:
            self.policy.set_attention(NAME)
        tokens = sequences[:, width:]
        logprobs = torch.stack(sampler.logprobs, dim=1)
        return [
            self._completed(job, row, row_logprobs, sampling)
            for job, row, row_logprobs in zip(chosen, tokens.tolist(), logprobs.tolist(), strict=True)
        ]

    def _settings(self, sampling: SamplingParams, pad: int):
        from transformers import GenerationConfig

        return GenerationConfig(
            do_sample=False,  # _Sampler decides, and generate takes what it leaves
            max_new_tokens=sampling.max_tokens,
            # A token that does not exist where nothing shall stop it: None would be taken from the model.
            eos_token_id=list(self._stop_ids(sampling)) or [-1],
            pad_token_id=pad,
        )

    def _completed(
        self, job: tuple[int, int], tokens: list[int], logprobs: list[float], sampling: SamplingParams
    ) -> GenerationOutput:
        stops = self._stop_ids(sampling)
        end = next((i + 1 for i, token in enumerate(tokens) if token in stops), None)
        completion = Completion(
            token_ids=tuple(tokens[:end]),
            logprobs=tuple(logprobs[:end]),
            finish=Finish.LENGTH if end is None else Finish.STOP,
            policy_version=self.policy_version,
        )
        return GenerationOutput(request=job[0], sample=job[1], completion=completion)

    def _stop_ids(self, sampling: SamplingParams) -> set[int]:
        return set() if sampling.ignore_eos else set(self.policy.stop_token_ids)

    def update_weights(self, policy_version: int) -> None:
        self.policy_version = policy_version  # the weights are the policy's own

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


def _filters(sampling: SamplingParams) -> list[LogitsProcessor]:
    """transformers' own temperature and filters, in its order."""
    filters: list[LogitsProcessor] = []
    if sampling.temperature > 0:
        filters.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.temperature > 0 and sampling.top_k:
        filters.append(TopKLogitsWarper(sampling.top_k))
    if sampling.temperature > 0 and sampling.top_p < 1:
        filters.append(TopPLogitsWarper(sampling.top_p))
    if sampling.temperature > 0 and sampling.min_p:
        filters.append(MinPLogitsWarper(sampling.min_p))
    return filters


class _Sampler(LogitsProcessor):
    """The last filter: one token of each row is left, drawn as `generate` would, or the likeliest without a
    generator. Keeps the logprobs.
    """

    def __init__(self, generator: torch.Generator | None):
        self.generator = generator
        self.logprobs: list[Tensor] = []  # [B] for every token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logprobs = scores.float().log_softmax(-1)
        if self.generator is None:
            token = logprobs.argmax(-1, keepdim=True)
        else:
            token = torch.multinomial(scores.softmax(-1), 1, generator=self.generator)
        self.logprobs.append(logprobs.gather(-1, token).squeeze(-1))
        return torch.full_like(scores, -torch.inf).scatter(-1, token, 0.0)
