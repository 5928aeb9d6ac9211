"""Common prefixes of prompts on a GPU: the engine computes them once, the update as well."""

import pytest
import torch

from tests.conftest import make_policy
from tests.gpu.test_native import gaps_of
from tests.model.test_shared_prefixes import OTHER, START, behind, numbered
from tests.support.engines import collect
from tests.support.gpu import WIDE, on_gpu
from tests.support.update import make_samples, train_on, updater_for, with_turns
from whetstone.engines.base import Request, SamplingParams
from whetstone.engines.native import NativeEngine, gpu
from whetstone.engines.native.prefill import PagedPrefill
from whetstone.model import shared_prefixes
from whetstone.update.packing import pack

pytestmark = pytest.mark.gpu

ENDS = ((5, 6, 7), (5,), (8, 9), (5, 6, 7), (5, 6))
PROMPTS = [(*start, *end) for end in ENDS for start in (START, OTHER)] + [(4, 5, 6)]
REQUESTS = [Request(prompt_ids=ids, seeds=(n, 100 + n)) for n, ids in enumerate(PROMPTS)]


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen2"])
def test_the_engine_computes_a_prefix_once(monkeypatch, architecture):
    policy = on_gpu(architecture)
    saved: list[int] = []

    class Counted(PagedPrefill):
        def __init__(self, state, sequences) -> None:
            super().__init__(state, sequences)
            saved.append(sum(map(len, sequences)) - sum(self.lengths))
            # All prompts of a batch with the same prefix but one take it from another.
            prefixes = [s.prompt[:96] for s in sequences if s.prompt[:96] in (START, OTHER)]
            shared = len(prefixes) - len(set(prefixes))
            assert saved[-1] == (96 * shared if shared_prefixes.MIN_PREFIX == 64 else 0)

    monkeypatch.setattr(gpu, "PagedPrefill", Counted)
    outputs, savings = {}, {}
    for least in (64, 1 << 30):
        monkeypatch.setattr(shared_prefixes, "MIN_PREFIX", least)
        saved.clear()
        outputs[least] = collect(NativeEngine(policy), REQUESTS, SamplingParams(max_tokens=6))
        savings[least] = sum(saved)
    # Ten prompts in two batches or three, as samples end: four or five of them are whole.
    assert savings[64] in (5 * 96, 6 * 96) and savings[1 << 30] == 0
    shared, alone = outputs[64], outputs[1 << 30]
    assert shared.keys() == alone.keys() and len(shared) == 2 * len(PROMPTS)
    for key, completion in shared.items():
        assert completion.token_ids == alone[key].token_ids
        assert completion.logprobs == pytest.approx(alone[key].logprobs, abs=1e-3)


def test_in_half_precision_logprobs_are_the_trainers():
    policy = on_gpu("llama", torch.bfloat16)
    completions = collect(NativeEngine(policy), REQUESTS, SamplingParams(max_tokens=6))
    for (number, _), completion in completions.items():
        assert gaps_of(policy, REQUESTS[number], completion).mean() < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", [list, with_turns])
def test_the_gradient_is_that_of_batches_that_share_nothing(monkeypatch, change, dtype):
    samples = change(make_samples(make_policy("llama", **WIDE)))
    samples = numbered(behind(START, samples), behind((*START[:70], 9), samples), behind(OTHER, samples))
    gradients: list[torch.Tensor] = []
    for least in (64, 1 << 30):
        monkeypatch.setattr(shared_prefixes, "MIN_PREFIX", least)
        updater = updater_for(on_gpu("llama", dtype))
        updater.optimizer.step = lambda norm, of=updater: gradients.append(
            torch.cat([g.double().flatten().cpu() for g in of.optimizer.gradients()])
        )
        train_on(updater, [pack(samples, 2000)])
    shared, alone = gradients
    assert (shared - alone).norm() / alone.norm() < (1e-4 if dtype == torch.float32 else 0.05)
