"""transformers' own `generate` as an engine: slow, and right by reputation; for architectures and
comparisons.

Uses the policy's weights in place. Every sample has its own seed, but not its own random numbers per token: a
sample is repeatable for the same batch of requests, which is all that resuming needs.
"""

from collections.abc import Iterator

import torch

from whetstone import seeds
from whetstone.engines.base import Request, Sampled, Sampling
from whetstone.errors import UserError
from whetstone.model.attention import NAME
from whetstone.model.policy import Policy
from whetstone.types import Completion, Finish


class HFEngine:
    def __init__(self, policy: Policy, max_batch: int, attention: str | None):
        self.policy = policy
        self.max_batch = max_batch
        self.attention = attention or policy.own_attention
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

    def generate(self, requests: list[Request], sampling: Sampling) -> Iterator[Sampled]:
        samples = [(r, s) for r, request in enumerate(requests) for s in range(len(request.seeds))]
        for start in range(0, len(samples), self.max_batch):
            chosen = samples[start : start + self.max_batch]
            yield from self._generate(requests, chosen, sampling)

    def _generate(
        self, requests: list[Request], chosen: list[tuple[int, int]], sampling: Sampling
    ) -> list[Sampled]:
        prompts = [requests[r].prompt_ids for r, _ in chosen]
        width = max(len(prompt) for prompt in prompts)
        pad = self.policy.tokenizer.pad_token_id
        token_ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        self.policy.model.eval()
        self.policy.set_attention(self.attention)
        devices = [self.policy.device] if self.policy.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices), torch.inference_mode():
                torch.manual_seed(seeds.seed(*[requests[r].seeds[s] for r, s in chosen]))
                out = self.policy.model.generate(
                    input_ids=token_ids.to(self.policy.device),
                    attention_mask=mask.to(self.policy.device),
                    generation_config=self._settings(sampling, pad),
                )
        finally:
            self.policy.set_attention(NAME)
        scores = torch.stack(out.scores, dim=1).float()  # [B, new, V], temperature and filters applied
        tokens = out.sequences[:, width:]
        logprobs = scores.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
        return [
            self._completed(where, row, row_logprobs, sampling)
            for where, row, row_logprobs in zip(chosen, tokens.tolist(), logprobs.tolist(), strict=True)
        ]

    def _settings(self, sampling: Sampling, pad: int):
        from transformers import GenerationConfig

        return GenerationConfig(
            do_sample=sampling.temperature > 0,
            temperature=sampling.temperature or 1.0,
            top_k=sampling.top_k,  # 0 for all: transformers takes 50 where nothing is said
            top_p=sampling.top_p,
            min_p=sampling.min_p or None,
            max_new_tokens=sampling.max_tokens,
            # A token that does not exist where nothing shall stop it: None would be taken from the model.
            eos_token_id=list(self._stops(sampling)) or [-1],
            pad_token_id=pad,
            output_scores=True,
            return_dict_in_generate=True,
        )

    def _completed(
        self, where: tuple[int, int], tokens: list[int], logprobs: list[float], sampling: Sampling
    ) -> Sampled:
        stops = self._stops(sampling)
        end = next((i + 1 for i, token in enumerate(tokens) if token in stops), None)
        completion = Completion(
            token_ids=tuple(tokens[:end]),
            logprobs=tuple(logprobs[:end]),
            finish=Finish.LENGTH if end is None else Finish.STOP,
            policy_version=self.policy_version,
        )
        return Sampled(request=where[0], sample=where[1], completion=completion)

    def _stops(self, sampling: Sampling) -> set[int]:
        return set() if sampling.ignore_stop else set(self.policy.stop_token_ids)

    def update_weights(self, policy_version: int) -> None:
        self.policy_version = policy_version  # the weights are the policy's own

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...
