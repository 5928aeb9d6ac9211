"""Exported folders and adapters in the real vLLM: greedy tokens are those of the run's own engine."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.support.exports import NUM_TOKENS, engine_tokens, make_run, prompts
from whetstone.export.folder import export
from whetstone.model.hub import resolve
from whetstone.run.source import find_source

pytestmark = pytest.mark.vllm
vllm: Any = pytest.importorskip("vllm", reason="make test-vllm sets it up")
LORA = {"use_peft": True, "lora_r": 4}


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; by default half of the machine's


def load_vllm(folder: str, **options: Any) -> Any:
    return vllm.LLM(
        folder, dtype="float32", enforce_eager=True, max_model_len=256, gpu_memory_utilization=0.2, **options
    )


def vllm_tokens(model: Any, tokenizer: Any, **options: Any) -> list[list[int]]:
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts(tokenizer)]
    outputs = model.generate(requests, sampling, use_tqdm=False, **options)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("settings", [{}, LORA], ids=["full", "merged"])
def test_greedy_tokens_are_those_of_the_run(settings: dict, tmp_path: Path) -> None:
    policy = make_run(tmp_path / "run", **settings)
    expected = engine_tokens(policy)
    exported = export(find_source(str(tmp_path / "run")), dtype="f32")
    assert not (exported.folder / "adapter_config.json").exists()
    assert vllm_tokens(load_vllm(str(exported.folder)), policy.tokenizer) == expected


def test_an_adapter_beside_its_base(tmp_path: Path) -> None:
    """`final_model` of a LoRA run as vLLM's own users load it; without it, the base answers."""
    policy = make_run(tmp_path / "run", **LORA)
    expected = engine_tokens(policy)
    model = load_vllm(resolve("pebble"), enable_lora=True, max_lora_rank=8)
    adapter = importlib.import_module("vllm.lora.request").LoRARequest(
        "run", 1, str(tmp_path / "run" / "final_model")
    )
    assert vllm_tokens(model, policy.tokenizer, lora_request=adapter) == expected
    assert vllm_tokens(model, policy.tokenizer) != expected
