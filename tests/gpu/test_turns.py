"""Conversations of several turns on a real GPU: the engine keeps keys and values between turns."""

import pytest
import torch

from tests.gpu.test_native import gaps_of
from tests.support.engines import PROMPTS, collect
from tests.support.gpu import on_gpu
from whetstone.engines.base import Request, SamplingParams
from whetstone.engines.native import NativeEngine
from whetstone.engines.native import gpu as gpu_engine
from whetstone.engines.native.gpu import PagedEngine
from whetstone.engines.native.prefill import PagedPrefill
from whetstone.engines.native.slot_state import PAGE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
SAMPLING = SamplingParams(max_tokens=45, ignore_eos=True)
HEARD = tuple(range(30, 49))
NUM_TURNS = 4


class Conversations:
    """The next turn of each sample as soon as the one before has ended, up to `NUM_TURNS`."""

    max_prompt_length, num_sequences = 400, 6
    max_length: int | None = None

    def __init__(self) -> None:
        self.requests = [Request(prompt_ids=prompt, seeds=(1, 2), may_continue=True) for prompt in PROMPTS]
        self.turns = dict.fromkeys(range(len(PROMPTS)), 1)  # by request
        self.ready: list[Request] = []
        self.num_open = 2 * len(PROMPTS)
        self.ended: list[tuple[int, int]] = []

    def take(self, *, wait: bool) -> list[Request]:
        ready, self.ready = self.ready, []
        for request in ready:
            assert request.continues is not None
            self.turns[len(self.requests)] = self.turns[request.continues[0]] + 1
            self.requests.append(request)
        return ready

    def cancelled(self) -> list[tuple[int, int]]:
        ended, self.ended = self.ended, []
        return ended

    def accept(self, output) -> None:
        request = self.requests[output.request]
        if self.turns[output.request] == NUM_TURNS:
            return self.ended.append((output.request, output.sample))
        self.ready.append(
            Request(
                prompt_ids=(*request.prompt_ids, *output.completion.token_ids, *HEARD),
                seeds=(request.seeds[output.sample] + 10,),
                may_continue=True,
                continues=(output.request, output.sample),
            )
        )


def converse(policy):
    """(requests, completions by (request, sample), tokens that were computed by prefill)."""
    conversations, completions = Conversations(), {}
    engine = NativeEngine(policy, 6)
    for output in engine.generate_open(list(conversations.requests), SAMPLING, conversations):
        completions[output.request, output.sample] = output.completion
        conversations.accept(output)
    assert len(completions) == 2 * len(PROMPTS) * NUM_TURNS
    return conversations.requests, completions


@pytest.fixture
def computed(monkeypatch) -> list[int]:
    """Lengths of the sequences that are prefilled."""
    lengths: list[int] = []

    class Counted(PagedPrefill):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            lengths.extend(self.lengths)

    monkeypatch.setattr(gpu_engine, "PagedPrefill", Counted)
    return lengths


@pytest.mark.parametrize("architecture", ["qwen2", "gemma2"])
def test_later_turns_are_those_of_whole_prompts(computed, architecture):
    policy = on_gpu(architecture, max_position_embeddings=512)
    requests, completions = converse(policy)
    later = [length for length in computed if length > max(map(len, PROMPTS))]
    assert set(later) == {len(HEARD)} and len(later) == 6 * (NUM_TURNS - 1)  # nothing is computed again
    for number, request in enumerate(requests):
        alone = collect(
            NativeEngine(policy, 2), [Request(prompt_ids=request.prompt_ids, seeds=request.seeds)], SAMPLING
        )
        for (_, sample), completion in alone.items():
            assert completions[number, sample].token_ids == completion.token_ids
            assert completions[number, sample].logprobs == pytest.approx(completion.logprobs, abs=1e-3)


def test_in_half_precision_logprobs_are_the_trainers():
    policy = on_gpu("llama", torch.bfloat16, max_position_embeddings=512)
    requests, completions = converse(policy)
    for (number, _), completion in completions.items():
        assert gaps_of(policy, requests[number], completion).mean() < 0.05


def test_histories_are_given_up_where_pages_are_few(computed, monkeypatch):
    policy = on_gpu("qwen2", max_position_embeddings=512)
    requests, plenty = converse(policy)
    computed.clear()

    def few(self, **_) -> None:
        if self.state.num_pages != 14:
            self.state.allocate_pages(14)

    monkeypatch.setattr(PagedEngine, "_prepare_pages", few)
    scarce_requests, scarce = converse(policy)
    assert max(computed) > PAGE  # some were computed anew
    by_prompt = {
        (r.prompt_ids, seed): plenty[n, s] for n, r in enumerate(requests) for s, seed in enumerate(r.seeds)
    }
    for number, request in enumerate(scarce_requests):
        for sample, seed in enumerate(request.seeds):
            assert scarce[number, sample].token_ids == by_prompt[request.prompt_ids, seed].token_ids
