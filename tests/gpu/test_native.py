"""The native engine on a real GPU: pages that run out, weights that change under captured graphs, LoRA, and
what a CPU draws from the same seeds.

make test-gpu        or        python -m pytest -m gpu tests/gpu
"""

import pytest
import torch

from tests.conftest import make_policy
from tests.support.engines import PROMPTS, collect
from tests.support.gpu import WIDE, on_gpu
from tests.support.update import share_kept, with_small_adapter
from whetstone.engines.base import PartialOutput, Request, SamplingParams
from whetstone.engines.native import NativeEngine
from whetstone.engines.native.fused_linear import FusedLinear
from whetstone.engines.native.gpu import STEPS_PER_ROUND, PagedEngine
from whetstone.model.attention import NAME, PackedAttention, packed_segments
from whetstone.types import Finish

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
GIB = 1 << 30
REQUESTS = [Request(prompt_ids=prompt, seeds=(1, 2, 3)) for prompt in PROMPTS]


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def greedy_of_generate(policy, prompt, count):
    policy.set_attention("eager")
    out = policy.lm.generate(
        torch.tensor([prompt], device="cuda"), attention_mask=torch.ones(1, len(prompt), device="cuda"),
        max_new_tokens=count, do_sample=False, eos_token_id=[-1], pad_token_id=0,
    )  # fmt: skip
    policy.set_attention(NAME)
    return out[0, len(prompt) :].tolist()


def test_samples_are_those_of_a_cpu_from_the_same_seeds():
    cpu, gpu = make_policy("qwen3", **WIDE), on_gpu("qwen3")
    samplings = [
        SamplingParams(max_tokens=40, temperature=0.7, top_k=9),
        SamplingParams(max_tokens=40, top_p=0.8),
    ]
    for sampling in (SamplingParams(max_tokens=40), *samplings, SamplingParams(max_tokens=40, min_p=0.1)):
        ours, theirs = (collect(NativeEngine(p, 4), REQUESTS, sampling) for p in (gpu, cpu))
        same = [key for key in ours if ours[key].token_ids == theirs[key].token_ids]
        assert len(same) >= len(ours) - 1, sampling  # a number that falls between two roundings
        for key in same:
            assert ours[key].logprobs == pytest.approx(theirs[key].logprobs, abs=1e-3)
            assert ours[key].finish == theirs[key].finish


def test_stream_yields_unfinished_samples_then_outputs():
    policy = on_gpu("llama", torch.float32)
    sampling = SamplingParams(max_tokens=90)
    expected = collect(NativeEngine(policy, 4), REQUESTS, sampling)  # fewer slots than samples
    finished, num_seen, num_steps = {}, {}, {}
    for output in NativeEngine(policy, 4).stream(REQUESTS, sampling):
        key = (output.request, output.sample)
        if isinstance(output, PartialOutput):
            count = len(output.token_ids)
            assert tuple(output.token_ids) == expected[key].token_ids[:count]
            assert output.logprobs == pytest.approx(expected[key].logprobs[:count], abs=1e-4)
            assert key not in finished and count - num_seen.get(key, 0) <= STEPS_PER_ROUND
            num_seen[key], num_steps[key] = count, num_steps.get(key, 0) + 1
        else:
            finished[key] = output.completion.token_ids
    assert finished == {key: completion.token_ids for key, completion in expected.items()}
    assert max(num_steps.values()) >= 90 // STEPS_PER_ROUND - 2


def test_preempted_sequence_resumes_where_it_was(monkeypatch):
    policy = on_gpu("llama", torch.float32)
    sampling = SamplingParams(max_tokens=110, ignore_eos=True)  # two pages each, and more than are there
    plenty = collect(NativeEngine(policy, 9), REQUESTS, sampling)
    engine = NativeEngine(policy, 9)
    monkeypatch.setattr(PagedEngine, "_prepare_pages", lambda self, **_: few(self.state))
    sent_back = []
    monkeypatch.setattr(
        PagedEngine, "_preempt", spying(PagedEngine._preempt, lambda slot: sent_back.append(slot))
    )

    def few(state):
        if state.num_pages != 13:
            state.allocate_pages(13)

    scarce = collect(engine, REQUESTS, sampling)
    assert sent_back
    assert scarce.keys() == plenty.keys()
    for key, completion in scarce.items():
        assert completion.token_ids == plenty[key].token_ids
        assert completion.logprobs == pytest.approx(plenty[key].logprobs, abs=1e-3)


def spying(method, note):
    def inner(self, seats, slot):
        note(slot)
        return method(self, seats, slot)

    return inner


def test_graphs_outlive_updates_and_a_cache_that_was_released():
    policy = on_gpu("qwen2")
    engine = NativeEngine(policy, 4)
    sampling = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    requests = [Request(prompt_ids=prompt, seeds=(0,)) for prompt in PROMPTS]
    for version in range(3):
        ours = collect(engine, requests, sampling)
        for number, prompt in enumerate(PROMPTS):
            assert list(ours[number, 0].token_ids) == greedy_of_generate(policy, prompt, 16)
        paged = engine.engine
        assert isinstance(paged, PagedEngine) and paged.graphs is not None and paged.state is not None
        captured = dict(paged.graphs.captured)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        engine.update_weights(version + 1)
        engine.sleep()
        assert paged.state.pages is None
        assert paged.graphs.captured == captured and captured
    assert collect(engine, requests, sampling)[0, 0].policy_version == 3


def test_pages_fit_into_memory_that_is_in_pieces():
    policy = on_gpu("qwen2")
    engine = NativeEngine(policy, 4)
    sampling = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    requests = [Request(prompt_ids=prompt, seeds=(0,)) for prompt in PROMPTS]
    before = collect(engine, requests, sampling)
    paged = engine.engine
    assert isinstance(paged, PagedEngine)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 6 * GIB) / total)
    try:
        block = torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")
        address = block.data_ptr()
        del block
        stays = torch.empty(GIB // 4, dtype=torch.uint8, device="cuda")
        assert address <= stays.data_ptr() < address + 4 * GIB  # in the middle of what was one piece
        paged._prepare_pages(preferred=1 << 40, least=4)
        assert paged.state.pages is not None
        assert GIB // 2 < paged.state.pages.nbytes < 2 * GIB  # of 5.75 GiB that are free, 2 are one piece
        after = collect(engine, requests, sampling)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    assert {key: out.token_ids for key, out in after.items()} == {
        key: out.token_ids for key, out in before.items()
    }


def test_fp8_rollouts_stay_near_the_weights_and_follow_them():
    policy = on_gpu("qwen2", torch.bfloat16)
    engines = [NativeEngine(policy, 9, fp8=eight) for eight in (False, True)]
    sampling = SamplingParams(max_tokens=32, ignore_eos=True)
    for version in range(3):
        captured = []
        for engine in engines:
            engine.update_weights(version)
            done = collect(engine, REQUESTS, sampling)
            gaps = torch.cat([gaps_of(policy, REQUESTS[at], one) for (at, _), one in done.items()])
            print(f"mean difference {gaps.mean():.4f}, eight bits: {engine is engines[1]}")
            captured.append(gaps.mean().item())
        assert captured[0] < 0.02
        assert captured[0] < captured[1] < 0.2  # rounded, and not more than that
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)


def gaps_of(policy, request, completion):
    """Between the engine's logprobs and the trainer's."""
    ids = torch.tensor([*request.prompt_ids, *completion.token_ids], device="cuda")
    attend = PackedAttention(packed_segments([len(ids)]), policy.device)
    with torch.no_grad():
        hidden = policy.hidden(ids[None], torch.arange(len(ids), device="cuda")[None], attend)
        logprobs = policy.head(hidden[0, len(request.prompt_ids) - 1 : -1]).float().log_softmax(-1)
    own = logprobs.gather(-1, ids[len(request.prompt_ids) :, None])[:, 0]
    return (own - torch.tensor(completion.logprobs, device="cuda")).abs()


@pytest.mark.parametrize(("bias", "merge"), [(False, True), (True, True), (True, False)])
def test_lora_rollout_leaves_trained_weights_untouched(bias, merge, monkeypatch):
    """Merged into copies, or, where there is no memory for those, applied on the fly."""
    monkeypatch.setattr("whetstone.engines.native.decode_step._fits_lora_copy", lambda policy: merge)
    from peft import LoraConfig, get_peft_model

    from whetstone.model.policy import Policy

    plain = on_gpu("qwen2" if bias else "llama")
    model = get_peft_model(plain.model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    policy = Policy(model, plain.tokenizer, torch.device("cuda"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine = NativeEngine(policy, 4)
    sampling = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    requests = [Request(prompt_ids=prompt, seeds=(0,)) for prompt in PROMPTS]
    collect(engine, requests, sampling)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    engine.update_weights(1)
    ours = collect(engine, requests, sampling)
    changed = 0
    for number, prompt in enumerate(PROMPTS):
        theirs = greedy_of_generate(policy, prompt, 16)
        assert list(ours[number, 0].token_ids) == theirs
        with model.disable_adapter():
            changed += theirs != greedy_of_generate(policy, prompt, 16)
    assert changed


@pytest.mark.parametrize("merge", [True, False])
def test_a_small_adapter_is_not_rounded_away(merge):
    policy = with_small_adapter(on_gpu("qwen2", torch.bfloat16, hidden_size=256))
    attention = policy.layers[0].self_attn
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    joined = FusedLinear(layers, merge=merge)
    x = torch.randn(200, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        base = torch.cat([layer.base_layer(x) for layer in layers], 1)
        change = torch.cat([x.float() @ layer.get_delta_weight("default").float().t() for layer in layers], 1)
        assert abs(share_kept(joined(x), base, change) - 1) < 0.2


def test_stops_limits_and_refilled_slots():
    policy = on_gpu("llama")
    requests = [
        Request(prompt_ids=prompt, seeds=tuple(range(40)), max_tokens=tuple(20 + s for s in range(40)))
        for prompt in PROMPTS
    ]
    done = collect(NativeEngine(policy, 16), requests, SamplingParams(max_tokens=60, temperature=1.5))
    assert len(done) == 120
    stopped = [c for c in done.values() if c.finish is Finish.STOP]
    cut = {key: c for key, c in done.items() if c.finish is Finish.LENGTH}
    assert stopped and cut
    assert all(c.token_ids[-1] == 2 and 2 not in c.token_ids[:-1] for c in stopped)
    assert all(len(c.token_ids) == 20 + key[1] and 2 not in c.token_ids for key, c in cut.items())


def test_saved_weights_are_whole_after_fusing(tmp_path):
    from transformers import AutoModelForCausalLM

    policy = on_gpu("qwen3")
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    collect(NativeEngine(policy, 4), REQUESTS, SamplingParams(max_tokens=4))
    policy.model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(value.cpu(), again[name]) for name, value in before.items())
    assert (tmp_path / "model.safetensors").stat().st_size < 1.2 * sum(
        value.numel() * 4 for value in before.values()
    )


def test_long_prompts_take_the_other_attention():
    policy = on_gpu("qwen2", torch.bfloat16)
    prompt = tuple(
        int(token) for token in torch.randint(3, 97, (3000,), generator=torch.Generator().manual_seed(0))
    )
    policy.config.max_position_embeddings = 4096
    engine = NativeEngine(policy, 4)
    ours = collect(engine, [Request(prompt_ids=prompt, seeds=(1, 2))], SamplingParams(max_tokens=8))
    for completion in ours.values():
        ids = torch.tensor([[*prompt, *completion.token_ids]], device="cuda")
        policy.set_attention("sdpa")
        with torch.no_grad():
            logprobs = policy.lm(ids).logits.float().log_softmax(-1)[0, len(prompt) - 1 : -1]
        policy.set_attention(NAME)
        expected = logprobs.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
        assert torch.tensor(completion.logprobs) == pytest.approx(expected.cpu(), abs=0.15)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_product_in_parts_is_the_product(parts, monkeypatch):
    torch.manual_seed(0)
    layer = torch.nn.Linear(4096, 256, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(24, 4096, device="cuda", dtype=torch.bfloat16)
    joined = FusedLinear([layer])
    monkeypatch.setattr(joined, "_num_splits", lambda rows: parts)
    out = joined.split_k(x)
    assert out.shape == ((24, 256) if parts == 1 else (parts, 24, 256))
    found = out.double() if parts == 1 else out.double().sum(0)
    expected = x.double() @ layer.weight.double().t()
    assert (found - expected).norm() / expected.norm() < (3e-3 if parts == 1 else 1e-5)
