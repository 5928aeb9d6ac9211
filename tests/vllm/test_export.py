"""Exported folders in the real vLLM: greedy tokens are those of the run's own engine."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.exports import NUM_TOKENS, engine_tokens, make_run, prompts
from whetstone.export.folder import export
from whetstone.run.source import find_source

pytestmark = pytest.mark.vllm
vllm: Any = pytest.importorskip("vllm", reason="make test-vllm sets it up")


@pytest.mark.parametrize("settings", [{}, {"use_peft": True, "lora_r": 4}], ids=["full", "lora"])
def test_greedy_tokens_are_those_of_the_run(settings: dict, tmp_path: Path) -> None:
    policy = make_run(tmp_path / "run", **settings)
    expected = engine_tokens(policy)
    exported = export(find_source(str(tmp_path / "run")), dtype="f32")
    model = vllm.LLM(str(exported.folder), dtype="float32", enforce_eager=True, max_model_len=256)
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts(policy.tokenizer)]
    outputs = model.generate(requests, sampling, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
