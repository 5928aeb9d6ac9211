"""The smallest engine: one sequence at a time, without a KV cache. Slow, and right."""

from collections.abc import Iterator

import torch

from whetstone.config import Config
from whetstone.engines.base import GenerationOutput, Request, SamplingParams
from whetstone.model.attention import PackedAttention, packed_segments
from whetstone.model.policy import Policy
from whetstone.types import Completion, Finish


class PlainEngine:
    def __init__(self, config: Config, policy: Policy) -> None:
        self.policy, self.version = policy, 0

    def generate(self, requests: list[Request], sampling: SamplingParams) -> Iterator[GenerationOutput]:
        """Yield every sample when it is finished, with its logprobs at the sampling temperature."""
        self.policy.model.eval()
        for number, request in enumerate(requests):
            for sample, seed in enumerate(request.seeds):
                completion = self.complete(request.prompt_ids, seed, sampling)
                yield GenerationOutput(request=number, sample=sample, completion=completion)

    @torch.inference_mode()
    def complete(self, prompt: tuple[int, ...], seed: int, sampling: SamplingParams) -> Completion:
        generator = torch.Generator().manual_seed(seed % 2**32)
        tokens, logprobs, finish = [], [], Finish.LENGTH
        while len(tokens) < sampling.max_tokens and finish is Finish.LENGTH:
            logits = self.next_token_logits([*prompt, *tokens])
            distribution = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
            token = int(distribution.argmax())  # temperature 0 is greedy
            if sampling.temperature > 0:
                token = int(torch.multinomial(distribution.exp(), 1, generator=generator))
            tokens.append(token)
            logprobs.append(float(distribution[token]))
            finish = Finish.STOP if token in self.policy.stop_token_ids else Finish.LENGTH
        return Completion(
            token_ids=tuple(tokens), logprobs=tuple(logprobs), finish=finish, policy_version=self.version
        )

    def next_token_logits(self, token_ids: list[int]) -> torch.Tensor:
        device, length = self.policy.device, len(token_ids)
        attention = PackedAttention(packed_segments([length]), device)
        positions = torch.arange(length, device=device)[None]
        hidden = self.policy.hidden(torch.tensor([token_ids], device=device), positions, attention)
        return self.policy.head(hidden[0, -1]).float()

    def update_weights(self, policy_version: int) -> None:
        """The policy's own weights are used, so there is nothing to copy."""
        self.version = policy_version

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...
