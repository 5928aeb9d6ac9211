"""LongRoPE: a run keeps to the short factors, in the update, in the engine and in servers."""

from pathlib import Path
from typing import Any

import torch

from tests.conftest import TINY, make_policy
from tests.support.engines import PROMPTS, collect
from whetstone.config import build
from whetstone.engines.base import Request, SamplingParams
from whetstone.engines.hf import HFEngine
from whetstone.engines.native import NativeEngine
from whetstone.engines.servers.settings import max_model_length

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 3.0, 9.0, 20.0],
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 1.0,
    "factor": 4.0,
}
SETTINGS = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}


def logits(policy, length):
    """Of four tokens in a sequence of `length`."""
    policy.set_attention("sdpa")
    ids = torch.tensor([[5, 6, 7, 8, *[9] * (length - 4)]])
    with torch.no_grad():
        return policy.lm(input_ids=ids, use_cache=False).logits[:, :4]


def test_a_policy_is_as_long_as_its_short_factors():
    policy = make_policy("phi3", **SETTINGS)
    assert policy.max_length == 32 < policy.config.max_position_embeddings
    assert make_policy("phi3").max_length == TINY["max_position_embeddings"]
    short, limit, long = (logits(policy, length) for length in (4, 32, 33))
    assert torch.allclose(short, limit, atol=1e-5)
    assert (short - long).abs().max() > 1e-2  # transformers' own pass: what this is about


def test_the_fused_step_samples_what_generate_does():
    policy = make_policy("phi3", **SETTINGS)
    policy.verify()
    sampling = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    requests = [Request(prompt_ids=prompt, seeds=(1,)) for prompt in PROMPTS]
    engine: Any = NativeEngine(policy)
    ours, own = collect(engine, requests, sampling), collect(HFEngine(policy, 9, None), requests, sampling)
    assert type(engine.engine.step).__name__ == "CpuLayerStep"
    assert {key: one.token_ids for key, one in ours.items()} == {
        key: one.token_ids for key, one in own.items()
    }


def test_servers_are_as_long(tmp_path: Path):
    for name, settings in (("long", SETTINGS), ("plain", {})):
        make_policy("phi3", **settings).lm.save_pretrained(tmp_path / name)

    def length(model: str, **keys: int) -> int | None:
        return max_model_length(build({"model_name_or_path": str(tmp_path / model), **keys}))

    assert length("plain") is None and length("long") == 32
    prompts = {"max_prompt_length": 20, "max_completion_length": 30}
    assert length("plain", **prompts) == 50 and length("long", **prompts) == 32
    assert length("long", **{**prompts, "max_completion_length": 5}) == 25
    assert (
        length("plain", server_max_model_length=64) == 64 and length("long", server_max_model_length=64) == 32
    )
