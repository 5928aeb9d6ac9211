"""The native engine on a CPU: continuous batching over slots.

Waiting samples enter free slots, finished ones leave at once. A prompt is prefilled once for all its samples
that enter together. The engine samples from the policy's own weights. A step of the model is in cpu_step.py,
the KV cache and its attention in cpu_cache.py, sampling in sampler.py.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from whetstone import seeds
from whetstone.engines.base import GenerationOutput, Request, SamplingParams
from whetstone.engines.native.cpu_cache import DecodeAttention, PrefillAttention, SlotCache
from whetstone.engines.native.cpu_step import CpuStep, make_cpu_step
from whetstone.engines.native.sampler import sample
from whetstone.engines.native.slot_state import CacheShape
from whetstone.model.policy import Policy
from whetstone.types import Completion, Finish

PREFILL_TOKENS = 8192  # packed prompts in one forward pass


@dataclass
class _RunningSequence:
    request: int
    sample: int
    position: int  # of the newest token, which is not in the cache yet
    uniforms: np.ndarray
    max_new: int  # tokens it may generate
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class SlotEngine:
    def __init__(self, policy: Policy, shape: CacheShape, max_slots: int):
        self.policy = policy
        self.max_slots = max_slots
        self.policy_version = 0
        self.shape = shape
        self.cache: SlotCache | None = None
        self.step: CpuStep | None = None  # chosen at the first token

    def generate(self, requests: list[Request], sampling: SamplingParams) -> Iterator[GenerationOutput]:
        # An abandoned generator must not leave autograd off for its caller: only _step runs without it.
        self.policy.model.eval()
        waiting = deque((r, s) for r, request in enumerate(requests) for s in range(len(request.seeds)))
        cache = self._prepare_cache(requests, sampling, len(waiting))
        if self.step is not None and not self.step.is_current():
            self.step = None
        running: list[_RunningSequence] = []
        while waiting or running:
            finished = self._step(requests, sampling, cache, waiting, running)
            for slot in sorted(finished, reverse=True):
                sequence = running[slot]
                yield self._completed(sequence, finished[slot])
                last = running.pop()
                if last is not sequence:
                    cache.move(len(running), slot, last.position)
                    running[slot] = last

    @torch.inference_mode()
    def _step(
        self,
        requests: list[Request],
        sampling: SamplingParams,
        cache: SlotCache,
        waiting: "deque[tuple[int, int]]",
        running: list[_RunningSequence],
    ) -> dict[int, Finish]:
        """Sample one token for every running sequence, after prefilling new ones; slot -> finish reason."""
        if waiting and len(running) < cache.num_slots:
            self._admit(requests, sampling, cache, waiting, running)
            new_slots = [slot for slot, sequence in enumerate(running) if len(sequence.tokens) == 1]
            finished = self._finished(running, new_slots, sampling)
            if finished:  # they leave before the next token is computed
                return finished
        self._decode(sampling, cache, running)
        return self._finished(running, range(len(running)), sampling)

    def _admit(
        self,
        requests: list[Request],
        sampling: SamplingParams,
        cache: SlotCache,
        waiting: "deque[tuple[int, int]]",
        running: list[_RunningSequence],
    ) -> None:
        """Fill free slots with waiting samples, prefill their prompts, and sample their first tokens."""
        groups: dict[int, list[int]] = {}
        tokens = 0
        while waiting and len(running) < cache.num_slots:
            r, s = waiting[0]
            prompt = requests[r].prompt_ids
            if r not in groups:
                if groups and tokens + len(prompt) > PREFILL_TOKENS:
                    break
                tokens += len(prompt)
            waiting.popleft()
            groups.setdefault(r, []).append(len(running))
            max_new = requests[r].limit(s, sampling)
            uniforms = seeds.uniforms(requests[r].seeds[s], 0, max_new)
            running.append(
                _RunningSequence(
                    request=r, sample=s, position=len(prompt) - 1, uniforms=uniforms, max_new=max_new
                )
            )
        lengths = [len(requests[r].prompt_ids) for r in groups]
        attend = PrefillAttention(cache, lengths, list(groups.values()), self.policy.device)
        token_ids = self._tensor([token for r in groups for token in requests[r].prompt_ids])
        position_ids = torch.cat([torch.arange(length) for length in lengths]).to(self.policy.device)
        hidden = self.policy.hidden(token_ids[None], position_ids[None], attend)[0]
        ends = self._tensor(np.cumsum(lengths) - 1)
        logits = self.policy.head(hidden[ends])
        slots = [slot for group in groups.values() for slot in group]
        rows = [row for row, group in enumerate(groups.values()) for _ in group]
        self._sample(logits[self._tensor(rows)], [running[slot] for slot in slots], sampling)

    def _decode(self, sampling: SamplingParams, cache: SlotCache, running: list[_RunningSequence]) -> None:
        positions = self._tensor([sequence.position for sequence in running])
        token_ids = self._tensor([sequence.tokens[-1] for sequence in running])
        attend = DecodeAttention(cache, positions, max(sequence.position for sequence in running))
        if self.step is None:
            self.step = make_cpu_step(self.policy, token_ids, positions, attend)
        self._sample(self.step(token_ids, positions, attend), running, sampling)

    def _sample(self, logits: Tensor, sequences: list[_RunningSequence], sampling: SamplingParams) -> None:
        uniform = torch.tensor(
            [sequence.uniforms[len(sequence.tokens)] for sequence in sequences], dtype=torch.float32
        )
        tokens, logprobs = sample(logits, uniform.to(logits.device), sampling)
        for sequence, token, logprob in zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.position += 1

    def _finished(
        self, running: list[_RunningSequence], slots, sampling: SamplingParams
    ) -> dict[int, Finish]:
        stops = set() if sampling.ignore_eos else set(self.policy.stop_token_ids)
        finished = {slot: Finish.STOP for slot in slots if running[slot].tokens[-1] in stops}
        for slot in slots:
            if slot not in finished and len(running[slot].tokens) >= running[slot].max_new:
                finished[slot] = Finish.LENGTH
        return finished

    def _completed(self, sequence: _RunningSequence, finish: Finish) -> GenerationOutput:
        completion = Completion(
            token_ids=tuple(sequence.tokens),
            logprobs=tuple(sequence.logprobs),
            finish=finish,
            policy_version=self.policy_version,
        )
        return GenerationOutput(request=sequence.request, sample=sequence.sample, completion=completion)

    def _prepare_cache(
        self, requests: list[Request], sampling: SamplingParams, num_samples: int
    ) -> SlotCache:
        """The present cache if it is large enough, else a new one."""
        capacity = max(len(request.prompt_ids) for request in requests) + sampling.max_tokens
        slots = min(self.max_slots, num_samples)
        if self.cache is not None and self.cache.num_slots >= slots and self.cache.capacity >= capacity:
            return self.cache
        self.cache = None
        self.cache = SlotCache(self.shape, slots, capacity)
        return self.cache

    def _tensor(self, values) -> Tensor:
        return torch.as_tensor(values, dtype=torch.long).to(self.policy.device, non_blocking=True)

    def update_weights(self, policy_version: int) -> None:
        self.policy_version = policy_version  # the weights are the policy's own

    def sleep(self) -> None:
        if self.shape.device.type == "cuda":  # a CPU needs no memory back
            self.cache = None

    def wake(self) -> None: ...

    def close(self) -> None:
        self.cache = None
