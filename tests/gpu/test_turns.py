"""Conversations of several turns on a real GPU: the engine keeps keys and values between turns."""

import pytest
import torch

from tests.gpu.test_native import gaps_of
from tests.support.engines import PROMPTS, collect
from tests.support.gpu import on_gpu
from tests.support.turns import HEARD, NUM_TURNS, SAMPLING, by_prompt, converse, new_weights_between_calls
from whetstone.engines.base import Request
from whetstone.engines.native import NativeEngine
from whetstone.engines.native import gpu as gpu_engine
from whetstone.engines.native.gpu import PagedEngine
from whetstone.engines.native.prefill import PagedPrefill
from whetstone.engines.native.slot_state import PAGE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


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
    expected = by_prompt(requests, plenty)
    for number, request in enumerate(scarce_requests):
        for sample, seed in enumerate(request.seeds):
            assert scarce[number, sample].token_ids == expected[request.prompt_ids, seed].token_ids


@pytest.mark.parametrize("architecture", ["qwen2", "gemma2"])
def test_new_weights_between_calls_leave_nothing_stale(architecture):
    new_weights_between_calls(on_gpu(architecture, max_position_embeddings=512))
