"""The native engine without a GPU: waiting samples enter free slots, finished ones leave at once.

A prompt is prefilled once for all its samples that enter together. No copy of the weights exists, so
`update_weights` only counts. The scheduling is here, a step of the model in slot_step.py, the cache and its
attention in cache.py, the drawing of tokens in sampler.py.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from whetstone import seeds
from whetstone.engines.base import Request, Sampled, Sampling
from whetstone.engines.native.cpu_cache import DecodeAttention, PrefillAttention, SlotCache
from whetstone.engines.native.cpu_step import SlotStep, choose
from whetstone.engines.native.sampler import sample
from whetstone.engines.native.slot_state import CacheShape
from whetstone.model.policy import Policy
from whetstone.types import Completion, Finish

PREFILL_TOKENS = 8192  # packed prompts in one forward pass


@dataclass
class _Running:
    """A sample in its slot."""

    request: int
    sample: int
    position: int  # of the newest token, which is not in the cache yet
    uniforms: np.ndarray
    limit: int  # tokens it may draw
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class SlotEngine:
    def __init__(self, policy: Policy, shape: CacheShape, max_slots: int):
        self.policy = policy
        self.max_slots = max_slots
        self.policy_version = 0
        self.shape = shape
        self.cache: SlotCache | None = None
        self.step: SlotStep | None = None  # chosen at the first token

    def generate(self, requests: list[Request], sampling: Sampling) -> Iterator[Sampled]:
        # A generator that is left in the middle must not leave autograd switched off for its caller: only
        # _step runs without gradients.
        self.policy.model.eval()
        waiting = deque((r, s) for r, request in enumerate(requests) for s in range(len(request.seeds)))
        cache = self._prepare_cache(requests, sampling, len(waiting))
        if self.step is not None and not self.step.is_current():
            self.step = None
        running: list[_Running] = []
        while waiting or running:
            finished = self._step(requests, sampling, cache, waiting, running)
            for slot in sorted(finished, reverse=True):
                entry = running[slot]
                yield self._completed(entry, finished[slot])
                last = running.pop()
                if last is not entry:
                    cache.move(len(running), slot, last.position)
                    running[slot] = last

    @torch.inference_mode()
    def _step(
        self,
        requests: list[Request],
        sampling: Sampling,
        cache: SlotCache,
        waiting: "deque[tuple[int, int]]",
        running: list[_Running],
    ) -> dict[int, Finish]:
        """One token for every running sample; newcomers are prefilled first. Returns who is finished, by
        slot.
        """
        if waiting and len(running) < cache.num_slots:
            self._admit(requests, sampling, cache, waiting, running)
            newcomers = [slot for slot, entry in enumerate(running) if len(entry.tokens) == 1]
            finished = self._finished(running, newcomers, sampling)
            if finished:  # they leave before the next token is computed
                return finished
        self._decode(sampling, cache, running)
        return self._finished(running, range(len(running)), sampling)

    def _admit(
        self,
        requests: list[Request],
        sampling: Sampling,
        cache: SlotCache,
        waiting: "deque[tuple[int, int]]",
        running: list[_Running],
    ) -> None:
        """Fill free slots with waiting samples, prefill their prompts, and draw their first tokens."""
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
            limit = requests[r].limit(s, sampling)
            numbers = seeds.uniforms(requests[r].seeds[s], 0, limit)
            running.append(
                _Running(request=r, sample=s, position=len(prompt) - 1, uniforms=numbers, limit=limit)
            )
        lengths = [len(requests[r].prompt_ids) for r in groups]
        attend = PrefillAttention(cache, lengths, list(groups.values()), self.policy.device)
        token_ids = self._tensor([token for r in groups for token in requests[r].prompt_ids])
        position_ids = torch.cat([torch.arange(length) for length in lengths]).to(self.policy.device)
        hidden = self.policy.hidden(token_ids[None], position_ids[None], attend)[0]
        ends = self._tensor(np.cumsum(lengths) - 1)
        logits = self.policy.head(hidden[ends])
        slots = [slot for members in groups.values() for slot in members]
        rows = [row for row, members in enumerate(groups.values()) for _ in members]
        self._draw(logits[self._tensor(rows)], [running[slot] for slot in slots], sampling)

    def _decode(self, sampling: Sampling, cache: SlotCache, running: list[_Running]) -> None:
        positions = self._tensor([entry.position for entry in running])
        token_ids = self._tensor([entry.tokens[-1] for entry in running])
        attend = DecodeAttention(cache, positions, max(entry.position for entry in running))
        if self.step is None:
            self.step = choose(self.policy, token_ids, positions, attend)
        self._draw(self.step(token_ids, positions, attend), running, sampling)

    def _draw(self, logits: Tensor, entries: list[_Running], sampling: Sampling) -> None:
        uniform = torch.tensor([entry.uniforms[len(entry.tokens)] for entry in entries], dtype=torch.float32)
        tokens, logprobs = sample(logits, uniform.to(logits.device), sampling)
        for entry, token, logprob in zip(entries, tokens.tolist(), logprobs.tolist(), strict=True):
            entry.tokens.append(token)
            entry.logprobs.append(logprob)
            entry.position += 1

    def _finished(self, running: list[_Running], slots, sampling: Sampling) -> dict[int, Finish]:
        stops = set() if sampling.ignore_stop else set(self.policy.stop_token_ids)
        ended = {slot: Finish.STOP for slot in slots if running[slot].tokens[-1] in stops}
        for slot in slots:
            if slot not in ended and len(running[slot].tokens) >= running[slot].limit:
                ended[slot] = Finish.LENGTH
        return ended

    def _completed(self, entry: _Running, finish: Finish) -> Sampled:
        completion = Completion(
            token_ids=tuple(entry.tokens),
            logprobs=tuple(entry.logprobs),
            finish=finish,
            policy_version=self.policy_version,
        )
        return Sampled(request=entry.request, sample=entry.sample, completion=completion)

    def _prepare_cache(self, requests: list[Request], sampling: Sampling, num_samples: int) -> SlotCache:
        """A cache that is large enough: the one at hand if it is, else a new one."""
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
        if self.shape.device.type == "cuda":  # elsewhere memory is the operating system's affair
            self.cache = None

    def wake(self) -> None: ...

    def close(self) -> None:
        self.cache = None
