"""On a real GPU: the engine against generate, the varlen update in bf16 against float32, and a short run.

make test-gpu        or        python -m pytest -m gpu tests/gpu
"""

import json
from typing import Any

import pytest
import torch

from tests.conftest import ARCHITECTURES, make_policy
from tests.model.test_policy import with_large_key_biases
from tests.support.engines import PROMPTS, collect
from tests.support.gpu import WIDE, on_gpu
from tests.support.update import flat_gradient, make_samples, train_on, updater_for, with_lora
from whetstone.engines.base import Request, SamplingParams
from whetstone.engines.native import NativeEngine
from whetstone.model.attention import NAME
from whetstone.model.compilation import compile_layers
from whetstone.model.memory import MemoryProbe
from whetstone.types import Group, Problem
from whetstone.update.micro_batch_size import ShardedSizeSearch, SizeBounds, synthetic_batch
from whetstone.update.packing import pack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
HEADS = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 512}  # as the kernels in CUDA take them


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_equal_those_of_generate(architecture):
    policy = on_gpu(architecture)
    policy.verify()
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    requests = [Request(prompt_ids=prompt, seeds=(0,)) for prompt in PROMPTS]
    engine: Any = NativeEngine(policy, max_slots=2)
    ours = collect(engine, requests, sampling)
    assert type(engine.engine.step).__name__ == "FusedStep"
    policy.set_attention("eager")
    for number, prompt in enumerate(PROMPTS):
        theirs = policy.lm.generate(
            torch.tensor([prompt], device="cuda"),
            attention_mask=torch.ones(1, len(prompt), device="cuda"),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=[-1],
            pad_token_id=0,
        )
        assert list(ours[number, 0].token_ids) == theirs[0, len(prompt) :].tolist()
    policy.set_attention(NAME)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral"])
def test_varlen_update_with_shared_prompts_matches_float32(architecture, lora):
    """bf16 through flash attention and the fused head, beside float32 through padded SDPA on the CPU."""
    cpu = make_policy(architecture, **WIDE)
    cpu = with_lora(cpu) if lora else cpu
    samples = make_samples(cpu)
    updater = updater_for(cpu)
    updater.optimizer.step = lambda norm: caught.append(flat_gradient(cpu))
    caught: list[torch.Tensor] = []
    train_on(updater, [pack(samples, 1000)])
    gpu = on_gpu(architecture, torch.bfloat16)
    gpu = with_lora(gpu) if lora else gpu
    updater = updater_for(gpu)
    updater.optimizer.step = lambda norm: caught.append(
        torch.cat([g.double().flatten().cpu() for g in updater.optimizer.gradients()])
    )
    train_on(updater, [pack(samples, 1000)])
    exact, half = caught
    assert (half - exact).norm() / exact.norm() < 0.05
    assert torch.nn.functional.cosine_similarity(half, exact, dim=0) > 0.998


@pytest.mark.parametrize(
    ("architecture", "seeds", "changes"), [("qwen3", 8, {}), ("qwen3", 64, HEADS), ("qwen2", 64, HEADS)]
)
def test_bf16_engine_and_trainer_agree(architecture, seeds, changes):
    """With 64 samples of each of three prompts and heads of 64, by the kernels in CUDA."""
    from whetstone.engines.native.kernels.hopper import attention as hopper_attention
    from whetstone.engines.native.kernels.hopper import gated as hopper_gated
    from whetstone.engines.native.kernels.hopper import linear as hopper_linear
    from whetstone.engines.native.kernels.hopper import tiles

    policy = on_gpu(architecture, torch.bfloat16, **changes)
    caches = [hopper_attention._compiled, hopper_gated._compiled, hopper_linear._compiled]
    before = [cache.cache_info().hits for cache in caches]
    samples = make_samples_from_engine(policy, seeds)
    if seeds == 64 and torch.cuda.get_device_capability() == tiles.CAPABILITY:
        assert all(cache.cache_info().hits > hits for cache, hits in zip(caches, before, strict=True))
    row = train_on(updater_for(policy, learning_rate=0.0), [pack(samples, 1000)])
    print(
        f"mean absolute difference of logprobs in bf16: {row['sampling/sampling_logp_difference/mean']:.4f}"
    )
    assert row["sampling/sampling_logp_difference/mean"] < 0.02


def make_samples_from_engine(policy, seeds):
    from whetstone.types import Rollout, Score, Turn
    from whetstone.update.packing import Sample

    requests = [Request(prompt_ids=prompt, seeds=tuple(range(seeds))) for prompt in PROMPTS]
    score = Score(reward=0.0, parts={"correct": 0.0}, answer=None)
    return [
        Sample(
            rollout=Rollout(
                prompt_ids=requests[r].prompt_ids, turns=(Turn(completion=completion),), text="", score=score
            ),
            index=place,
            keep=True,
        )
        for place, ((r, _), completion) in enumerate(
            collect(NativeEngine(policy, 2 * seeds), requests, SamplingParams(max_tokens=40)).items()
        )
    ]


@pytest.mark.parametrize("bf16", [False, True])
def test_the_quickstart_learns_on_the_gpu(tmp_path, bf16):
    from whetstone.config import load
    from whetstone.train import train

    words = [f"output_dir={tmp_path}", f"bf16={bf16}", "max_steps=20", "eval_num_samples=150", "device=cuda"]
    results = train(load("quickstart", words))
    rows = [json.loads(line) for line in (tmp_path / "quickstart" / "metrics.jsonl").read_text().splitlines()]
    differences = [row["sampling/sampling_logp_difference/mean"] for row in rows if row["kind"] == "train"]
    print(f"bf16={bf16}: {results['accuracy_before']['mean']:.3f} -> {results['accuracy_after']['mean']:.3f} "
          f"in {results['seconds']} s, logprob difference at most {max(differences):.5f}")  # fmt: skip
    assert results["accuracy_after"]["mean"] > results["accuracy_before"]["mean"] + 0.3
    assert max(differences) < (0.02 if bf16 else 1e-3)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_compiled_layers_have_the_gradient_of_plain_ones(architecture, lora):
    gradients = []
    for compiled in (False, True):
        policy = with_lora(on_gpu(architecture)) if lora else on_gpu(architecture)
        if compiled:
            compile_layers(policy)
        updater = updater_for(policy)
        updater.optimizer.step = lambda norm, of=updater: gradients.append(
            torch.cat([g.double().flatten().cpu() for g in of.optimizer.gradients()])
        )
        train_on(updater, [pack(make_samples(make_policy(architecture)), 1000)])
    plain, fast = gradients
    assert (fast - plain).norm() / plain.norm() < 1e-4


def test_budget_is_found_and_out_of_memory_is_survived():
    """The allocator is capped a little above what the model needs."""
    policy = on_gpu("llama", torch.bfloat16)
    updater = updater_for(policy)
    samples = make_samples(make_policy("llama"))
    problem = Problem(id="a", task="b", messages=({"role": "user", "content": "c"},), answer=None)
    groups = [Group(problem=problem, rollouts=tuple(sample.rollout for sample in samples))]
    wanted = sum(sample.num_tokens for sample in samples)
    assert updater.micro_batch_tokens(groups) == wanted
    assert all(parameter.grad is None for parameter in policy.parameters())
    policy = on_gpu("llama", torch.bfloat16)
    again = updater_for(policy)
    again.micro_batch_size.tokens = 1 << 20
    big = synthetic_batch(1 << 20, longest=1024, prompt=64, vocab_size=97).to(policy.device)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + (2 << 30)) / total)
    try:
        row = train_on(again, [[big]])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    print(
        f"out of memory {row['oom_splits']:.0f} times; {again.micro_batch_size.tokens:,} tokens a micro-batch"
    )
    assert row["oom_splits"] >= 1


def test_ranks_find_a_budget_without_out_of_memory():
    """On one GPU and whole weights: the passes and their memory are real, the ranks are not. Passes of
    gigabytes: torch takes memory in pieces of 20 MB, a quarter of what a smaller model would need here.
    """
    sizes_of = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    policy = on_gpu("llama", torch.bfloat16, **sizes_of)
    updater = updater_for(policy)

    def attempt(tokens: int) -> None:
        batch = synthetic_batch(tokens, longest=1024, prompt=64, vocab_size=97)
        updater.trial_step([batch, batch])

    attempt(256)
    gauge, sizes = (
        MemoryProbe(policy.device),
        SizeBounds(longest=1024, total=1 << 20, uses_padding=policy.uses_padding),
    )
    much = gauge.peak_bytes(lambda: attempt(8192))
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + much) / total)
    try:
        budget = ShardedSizeSearch(policy, attempt, sizes, gauge).find(allow_checkpointing=False)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    print(f"{budget.tokens:,} tokens where 8,192 would take all")
    assert 4096 <= budget.tokens < 8192


def test_large_key_biases_in_bf16_are_not_refused():
    """Qwen2.5 was, while eager attention in bf16 was taken for the truth."""
    policy = with_large_key_biases(on_gpu("qwen2", torch.bfloat16, num_hidden_layers=6))
    policy.verify()
    assert policy.is_packed
