"""The native engine on a CPU: continuous batching over slots; samples of a prompt share its prefill."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
import torch
from torch import Tensor

from whetstone import seeds
from whetstone.engines.base import (
    GenerationOutput,
    PartialOutput,
    Request,
    RequestStream,
    SamplingParams,
    measure_room,
)
from whetstone.engines.native.cpu_cache import DecodeAttention, PrefillAttention, SlotCache
from whetstone.engines.native.cpu_step import CpuStep, make_cpu_step
from whetstone.engines.native.sampling import SamplingEngine
from whetstone.engines.native.slot_state import CacheShape
from whetstone.model.policy import Policy
from whetstone.model.shared_prefixes import PlacedPrompt, have_common_prefix, place_prompt, shared_length
from whetstone.terminal.stages import add_tokens
from whetstone.types import Finish, TopLogprobs

PREFILL_TOKENS = 8192  # packed prompts in one forward pass


@dataclass(frozen=True)
class _WaitingSample:
    number: int  # of its request
    request: Request
    sample: int

    @property
    def key(self) -> tuple[int, int]:
        return self.number, self.sample


@dataclass
class _RunningSequence:
    waiting: _WaitingSample
    position: int  # of the newest token, which is not in the cache yet
    uniforms: np.ndarray
    max_new: int  # tokens it may generate
    sampling: SamplingParams
    stops: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)


@dataclass(frozen=True)
class _Generation:
    """One call of `generate`."""

    sampling: SamplingParams
    cache: SlotCache
    numbers: Iterator[int] = field(default_factory=count)  # of requests
    waiting: deque[_WaitingSample] = field(default_factory=deque)
    running: list[_RunningSequence] = field(default_factory=list)  # by slot

    @property
    def can_admit(self) -> bool:
        return bool(self.waiting) and len(self.running) < self.cache.num_slots

    def add(self, requests: list[Request]) -> None:
        for request in requests:
            number = next(self.numbers)
            self.waiting.extend(_WaitingSample(number, request, s) for s in range(len(request.seeds)))

    def cancel(self, samples: Sequence[tuple[int, int]]) -> None:
        if not samples:
            return
        unwanted = set(samples)
        remaining = [sample for sample in self.waiting if sample.key not in unwanted]
        self.waiting.clear()
        self.waiting.extend(remaining)
        for slot in reversed(range(len(self.running))):
            if self.running[slot].waiting.key in unwanted:
                self.free(slot)

    def free(self, slot: int) -> None:
        """End the sequence in `slot`; the last one moves there."""
        last = self.running.pop()
        if slot < len(self.running):
            self.cache.move(len(self.running), slot, last.position)
            self.running[slot] = last


class SlotEngine(SamplingEngine):
    def __init__(self, policy: Policy, shape: CacheShape, max_slots: int):
        super().__init__(policy, shape, max_slots)
        self.cache: SlotCache | None = None
        self.step: CpuStep | None = None  # chosen at the first token

    def _outputs(
        self,
        requests: list[Request],
        sampling: SamplingParams,
        stream: RequestStream | None = None,
        *,
        with_partial: bool = False,
    ) -> Iterator[GenerationOutput | PartialOutput]:
        # An abandoned generator must not leave autograd off for its caller: only _step runs without it.
        self.policy.modes.train(False)
        if self.step is not None and not self.step.is_current():
            self.step = None
        generation = _Generation(sampling, self._prepare_cache(requests, sampling, stream))
        generation.add(requests)
        waiting, running = generation.waiting, generation.running
        while waiting or running or stream is not None:
            if stream is not None:
                generation.cancel(stream.cancelled())
                generation.add(stream.take(wait=not waiting and not running))
                if not waiting and not running:
                    return
            finished = self._step(generation)
            for slot in sorted(finished, reverse=True):
                sequence = running[slot]
                key, tokens = sequence.waiting.key, sequence.tokens
                output = self.output(*key, tokens, sequence.logprobs, finished[slot])
                yield replace(output, top=sequence.top) if sequence.top else output
                generation.free(slot)
            for sequence in running if with_partial else ():
                yield PartialOutput(
                    request=sequence.waiting.number,
                    sample=sequence.waiting.sample,
                    token_ids=sequence.tokens,
                    logprobs=sequence.logprobs,
                    top=sequence.top,
                )

    def _step(self, generation: _Generation) -> dict[int, Finish]:
        """Sample one token for every running sequence, after prefilling new ones; slot -> finish reason."""
        # In inference mode DTensor sees whole linear layers and takes longer to plan each new shape of them.
        with torch.inference_mode() if self.policy.sharding is None else torch.no_grad():
            return self._sample_next(generation)

    def _sample_next(self, generation: _Generation) -> dict[int, Finish]:
        running = generation.running
        if generation.can_admit:
            self._admit(generation)
            new_slots = [slot for slot, sequence in enumerate(running) if len(sequence.tokens) == 1]
            finished = self._finished(generation, new_slots)
            if finished:  # they leave before the next token is computed
                return finished
        positions = self._tensor([sequence.position for sequence in running])
        token_ids = self._tensor([sequence.tokens[-1] for sequence in running])
        attend = DecodeAttention(generation.cache, positions, max(sequence.position for sequence in running))
        if self.step is None:
            self.step = make_cpu_step(self.policy, token_ids, positions, attend)
        with self._selecting([sequence.waiting.request.adapter for sequence in running], dim=1):
            logits = self.step(token_ids, positions, attend)
        self._sample(logits, running)
        return self._finished(generation, range(len(running)))

    def _admit(self, generation: _Generation) -> None:
        """Fill free slots with waiting samples, prefill their prompts, and sample their first tokens."""
        running, waiting = generation.running, generation.waiting
        groups: dict[int, list[int]] = {}  # number of a request -> slots
        requests: list[Request] = []  # one for each group
        tokens = 0
        while generation.can_admit:
            sample = waiting[0]
            request, prompt = sample.request, sample.request.prompt_ids
            if sample.number not in groups:
                cost = len(prompt) - (shared_length(requests[-1].prompt_ids, prompt) if requests else 0)
                if groups and tokens + cost > PREFILL_TOKENS:
                    break
                tokens += cost
                requests.append(request)
            waiting.popleft()
            groups.setdefault(sample.number, []).append(len(running))
            max_new = request.limit(sample.sample, generation.sampling)
            uniforms = seeds.uniforms(request.seeds[sample.sample], 0, max_new)
            sampling = request.params(generation.sampling)
            stops = sampling.stop_ids(self.policy.stop_token_ids)
            running.append(_RunningSequence(sample, len(prompt) - 1, uniforms, max_new, sampling, stops))
        admitted = list(zip(requests, groups.values(), strict=True))
        if have_common_prefix([request.prompt_ids for request in requests]):  # then those are neighbors
            admitted.sort(key=lambda pair: (pair[0].adapter, pair[0].prompt_ids))
        logits = self._prefill(generation.cache, admitted)
        rows = [row for row, (_, slots) in enumerate(admitted) for _ in slots]
        self._sample(logits[self._tensor(rows)], [running[slot] for _, slots in admitted for slot in slots])

    def _prefill(self, cache: SlotCache, admitted: list[tuple[Request, list[int]]]) -> Tensor:
        """Logits after the prompts, whose keys and values go into the slots of their samples."""
        prompts: list[PlacedPrompt] = []
        adapters: list[int] = []  # of every token
        for request, _ in admitted:
            # Another adapter makes other keys and values of the same tokens.
            previous = prompts[-1] if prompts and adapters[-1] == request.adapter else None
            prompts.append(place_prompt(request.prompt_ids, len(adapters), previous))
            adapters += [request.adapter] * prompts[-1].segment.length
        attend = PrefillAttention(cache, prompts, [slots for _, slots in admitted], self.policy.device)
        token_ids = self._tensor([token for prompt in prompts for token in prompt.own_ids])
        position_ids = self._tensor([position for prompt in prompts for position in prompt.positions])
        with self._selecting(adapters, dim=0):
            hidden = self.policy.hidden(token_ids[None], position_ids[None], attend)[0]
        return self.policy.head(hidden[self._tensor([prompt.last_token for prompt in prompts])])

    def _sample(self, logits: Tensor, sequences: list[_RunningSequence]) -> None:
        uniform = torch.tensor(
            [sequence.uniforms[len(sequence.tokens)] for sequence in sequences], dtype=torch.float32
        )
        params = [sequence.sampling for sequence in sequences]
        tokens, logprobs = sample_rows(logits, uniform.to(logits.device), params)
        for sequence, token, logprob in zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.position += 1
        add_tokens(len(sequences))
        for row, sequence in zip(logits, sequences, strict=True):
            if sequence.sampling.num_top:
                sequence.top.append(top_logprobs(row, sequence.sampling))

    @staticmethod
    def _finished(generation: _Generation, slots: Iterable[int]) -> dict[int, Finish]:
        finished: dict[int, Finish] = {}
        for slot in slots:
            sequence = generation.running[slot]
            if sequence.tokens[-1] in sequence.stops:
                finished[slot] = Finish.STOP
            elif len(sequence.tokens) >= sequence.max_new:
                finished[slot] = Finish.LENGTH
        return finished

    def _prepare_cache(
        self,
        requests: list[Request],
        sampling: SamplingParams,
        stream: RequestStream | None,
    ) -> SlotCache:
        """The present cache if it is large enough, else a new one."""
        room = measure_room(requests, sampling, stream)
        slots = min(self.max_slots, room.sequences)
        if self.cache is None or self.cache.num_slots < slots or self.cache.capacity < room.total:
            self.cache = None  # before the new one is allocated
            self.cache = SlotCache(self.shape, slots, room.total)
        return self.cache

    def _selecting(self, adapters: list[int], *, dim: int) -> AbstractContextManager[None]:
        """Inside, the rows of a forward pass use these adapters."""
        if self.adapters is None:
            return nullcontext()
        return self.adapters.rows(self._tensor(adapters).unsqueeze(dim))

    def _tensor(self, values) -> Tensor:
        return torch.as_tensor(values, dtype=torch.long).to(self.policy.device, non_blocking=True)

    def sleep(self) -> None:
        if self.shape.device.type == "cuda":  # a CPU needs no memory back
            self.cache = None

    def close(self) -> None:
        self.cache = None


def sample_rows(logits: Tensor, uniform: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """`sample` with parameters for each row: rows with the same ones are sampled together."""
    groups: dict[tuple[float, ...], list[int]] = {}
    for row, sampling in enumerate(params):
        groups.setdefault(sampling.distribution, []).append(row)
    if len(groups) == 1:
        return sample(logits, uniform, params[0])
    tokens, logprobs = torch.empty_like(uniform, dtype=torch.long), torch.empty_like(uniform)
    for rows in groups.values():
        index = torch.tensor(rows, device=logits.device)
        tokens[index], logprobs[index] = sample(logits[index], uniform[index], params[rows[0]])
    return tokens, logprobs


def sample(logits: Tensor, uniform: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """[B, V] logits and [B] uniform numbers -> ([B] tokens, [B] logprobs).

    Through the cumulative distribution: a sample depends on its own seed and logits, not on its batch.
    """
    logprobs = _distribution(logits, sampling)
    if sampling.is_greedy:
        tokens = logits.argmax(-1)
        return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)
    cumulative = logprobs.exp().cumsum(-1)
    total = cumulative[:, -1:]
    # Strictly below the total, so that a token without probability is never reached.
    threshold = torch.minimum(
        uniform.to(total.dtype)[:, None] * total, torch.nextafter(total, torch.zeros_like(total))
    )
    tokens = torch.searchsorted(cumulative, threshold, right=True)
    tokens.clamp_(max=logits.shape[-1] - 1)  # beyond it where logits are NaN: then so is the logprob
    return tokens.squeeze(-1), logprobs.gather(-1, tokens).squeeze(-1)


def top_logprobs(logits: Tensor, sampling: SamplingParams) -> TopLogprobs:
    """The likeliest of [V] logits as they are sampled; tokens that a filter removed are left out."""
    logprobs = _distribution(logits[None], sampling)[0]
    best = logprobs.topk(min(sampling.num_top, len(logprobs)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(pair for pair in pairs if pair[1] > float("-inf"))


def _distribution(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Logprobs of all tokens, with temperature and filters; greedy: those of temperature 1."""
    logits = logits.float()
    if sampling.is_greedy:
        return logits.log_softmax(-1)
    logprobs = (logits / sampling.temperature).log_softmax(-1)
    return _filter(logprobs, sampling).log_softmax(-1) if sampling.is_filtered else logprobs


def _filter(logprobs: Tensor, sampling: SamplingParams) -> Tensor:
    """-inf for tokens that top-k, top-p or min-p remove; the likeliest token and ties with the last stay."""
    ordered = logprobs.sort(-1, descending=True).values
    drop = torch.zeros_like(ordered, dtype=torch.bool)
    if sampling.top_k:
        drop[:, sampling.top_k :] = True
    if sampling.min_p > 0:
        drop |= ordered.exp() < sampling.min_p * ordered[:, :1].exp()
    if sampling.top_p < 1:
        # Filters work one after the other, as in transformers: top-p counts within what the others left.
        probabilities = ordered.masked_fill(drop, float("-inf")).softmax(-1)
        drop |= probabilities.cumsum(-1) - probabilities >= sampling.top_p
    drop[:, 0] = False
    lowest = ordered.masked_fill(drop, float("inf")).amin(-1, keepdim=True)
    return logprobs.masked_fill(logprobs < lowest, float("-inf"))
