"""What a server needs of the native engine on a real GPU: parameters, adapters and ends of each request."""

import pytest
import torch
from torch import nn

from tests.support.engines import PROMPTS, collect, come_and_leave
from tests.support.gpu import on_gpu
from whetstone.engines.base import Request, SamplingParams
from whetstone.engines.native import NativeEngine
from whetstone.engines.native.decode_step import FusedStep
from whetstone.model.adapters import AdapterLinear, AdapterSelection

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def test_requests_with_own_parameters_join_and_leave():
    come_and_leave(on_gpu("llama"))


def add_adapters(policy, chosen: tuple[int, ...]) -> None:
    """The adapters `chosen` of two, the same ones for the same numbers."""
    selection = AdapterSelection(("first", "second"))
    generator = torch.Generator().manual_seed(5)
    for layer in policy.trunk.layers:
        attention = layer.self_attn
        for parent, name in ((attention, "q_proj"), (attention, "v_proj"), (layer.mlp, "up_proj")):
            base: nn.Linear = getattr(parent, name)
            factors = {
                number: (
                    torch.randn(rank, base.in_features, generator=generator).cuda() / 4,
                    torch.randn(base.out_features, rank, generator=generator).cuda() / 4,
                )
                for number, rank in ((1, 4), (2, 8))
            }
            factors = {number: factors[number] for number in chosen}
            setattr(parent, name, AdapterLinear(base, factors, selection))


def test_adapters_in_one_batch_are_those_of_each_alone():
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    policy = on_gpu("qwen2")
    add_adapters(policy, (1, 2))
    engine = NativeEngine(policy, 6)
    requests = [
        Request(prompt_ids=prompt, seeds=(0,), adapter=adapter) for prompt in PROMPTS for adapter in (0, 1, 2)
    ]
    together = collect(engine, requests, sampling)
    assert isinstance(engine.engine.step, FusedStep)  # type: ignore[attr-defined]
    assert len({together[number, 0].token_ids for number in range(3)}) == 3
    for adapter in (0, 1, 2):
        alone = on_gpu("qwen2")
        if adapter:
            add_adapters(alone, (adapter,))
        own = [Request(prompt_ids=prompt, seeds=(0,), adapter=adapter) for prompt in PROMPTS]
        for (number, _), completion in collect(NativeEngine(alone, 6), own, sampling).items():
            assert completion.token_ids == together[3 * number + adapter, 0].token_ids
