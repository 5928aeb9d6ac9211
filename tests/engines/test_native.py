"""The native engine against transformers' generate, and against the trainer's own logprobs."""

import itertools
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

from tests.conftest import ARCHITECTURES, make_policy
from tests.support.engines import PROMPTS, collect, come_and_leave, compare_with_trainer, trainer_logprobs
from tests.support.turns import new_weights_between_calls
from tests.support.update import with_lora
from whetstone.config.sections import ModelConfig
from whetstone.engines.base import PartialOutput, Request, SamplingParams
from whetstone.engines.hf import HFEngine, _filters, _Sampler
from whetstone.engines.native import NativeEngine
from whetstone.engines.native.cpu import SlotEngine, sample
from whetstone.engines.native.cpu_step import CpuLayerStep, CpuModuleStep
from whetstone.errors import UserError
from whetstone.model.attention import NAME
from whetstone.model.policy import load_policy
from whetstone.terminal.stages import stage
from whetstone.types import Finish


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_equal_those_of_generate(architecture):
    policy = make_policy(architecture)
    policy.verify()
    engine = NativeEngine(policy, max_slots=2)  # fewer slots than samples: some wait, slots are refilled
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    ours = collect(engine, [Request(prompt_ids=prompt, seeds=(0,)) for prompt in PROMPTS], sampling)
    policy.set_attention("eager")
    for number, prompt in enumerate(PROMPTS):
        theirs = policy.lm.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=24,
            do_sample=False, eos_token_id=[-1], pad_token_id=0,
        )  # fmt: skip
        assert list(ours[number, 0].token_ids) == theirs[0, len(prompt) :].tolist()
    policy.set_attention(NAME)


def test_stream_has_every_step_and_the_outputs_of_generate():
    policy = make_policy()
    requests = [Request(prompt_ids=prompt, seeds=(1, 2)) for prompt in PROMPTS]
    sampling = SamplingParams(max_tokens=12)
    expected = collect(NativeEngine(policy, 3), requests, sampling)
    finished, partial = {}, {}
    for output in NativeEngine(policy, 3).stream(requests, sampling):
        key = (output.request, output.sample)
        if isinstance(output, PartialOutput):
            assert key not in finished and len(output.token_ids) == len(output.logprobs)
            partial.setdefault(key, []).append(tuple(output.token_ids))
        else:
            finished[key] = output.completion
    assert finished == expected
    for key, steps in partial.items():
        tokens = expected[key].token_ids
        # The step after a prefill samples two tokens, and the last one is the finished sample.
        assert steps == [tokens[:count] for count in range(2, len(tokens))]
    assert len(partial) == len([key for key in expected if len(expected[key].token_ids) > 2])


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "mistral"])
def test_logprobs_are_the_trainers(architecture):
    policy = make_policy(architecture)
    engine = NativeEngine(policy, max_slots=3)
    requests = [Request(prompt_ids=prompt, seeds=(1, 2, 3)) for prompt in PROMPTS]
    for (r, _), completion in collect(
        engine, requests, SamplingParams(max_tokens=16, temperature=0.7)
    ).items():
        expected = trainer_logprobs(policy, PROMPTS[r], completion, 0.7)
        assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_readable_models_run_by_blocks_and_still_train(architecture):
    policy = make_policy(architecture)
    engine = NativeEngine(policy, 3).engine
    assert isinstance(engine, SlotEngine)
    requests = [Request(prompt_ids=prompt, seeds=(1, 2)) for prompt in PROMPTS]
    collect(engine, requests, SamplingParams(max_tokens=3))
    assert isinstance(engine.step, CpuLayerStep)
    step = engine.step
    for change in ("in place", "elsewhere"):
        with torch.no_grad():
            for parameter in policy.model.parameters():
                if change == "elsewhere":
                    parameter.data = parameter.data.clone()
                parameter.mul_(1.05)
        for (r, _), completion in collect(engine, requests, SamplingParams(max_tokens=8)).items():
            expected = trainer_logprobs(policy, PROMPTS[r], completion)
            assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-4)
            assert expected.requires_grad
        assert (engine.step is step) == (change == "in place")


def test_an_adapter_is_run_by_the_modules():
    policy = load_policy(ModelConfig(model_name_or_path="pebble", device="cpu", use_peft=True, lora_r=2))
    engine = NativeEngine(policy, 3).engine
    assert isinstance(engine, SlotEngine)
    collect(engine, [Request(prompt_ids=(5, 9), seeds=(1,))], SamplingParams(max_tokens=3))
    assert isinstance(engine.step, CpuModuleStep)


def test_a_sample_does_not_depend_on_what_shares_its_batch(policy):
    sampling = SamplingParams(max_tokens=20)
    alone = collect(NativeEngine(policy, 1), [Request(prompt_ids=PROMPTS[1], seeds=(77,))], sampling)[0, 0]
    crowd = [Request(prompt_ids=prompt, seeds=(5, 77, 9)) for prompt in PROMPTS]
    for slots in (1, 2, 4, 64):
        assert collect(NativeEngine(policy, slots), crowd, sampling)[1, 1].token_ids == alone.token_ids


def test_samples_of_one_prompt_differ_and_repeat(policy):
    requests = [Request(prompt_ids=PROMPTS[0], seeds=tuple(range(8)))]
    first = collect(NativeEngine(policy, 8), requests, SamplingParams(max_tokens=12))
    again = collect(NativeEngine(policy, 8), requests, SamplingParams(max_tokens=12))
    assert first == again
    assert len({completion.token_ids for completion in first.values()}) == 8


def test_stop_token_ends_a_completion_and_is_part_of_it(policy):
    requests = [Request(prompt_ids=prompt, seeds=tuple(range(40))) for prompt in PROMPTS]
    done = collect(
        NativeEngine(policy, 16), requests, SamplingParams(max_tokens=60, temperature=1.5)
    ).values()
    stopped = [c for c in done if c.finish is Finish.STOP]
    cut = [c for c in done if c.finish is Finish.LENGTH]
    assert stopped and cut
    assert all(c.token_ids[-1] == 2 and 2 not in c.token_ids[:-1] for c in stopped)
    assert all(len(c.token_ids) == 60 and 2 not in c.token_ids for c in cut)


def test_completions_carry_the_version_of_the_weights(policy):
    engine = NativeEngine(policy, 4)
    engine.update_weights(7)
    assert (
        collect(engine, [Request(prompt_ids=(4,), seeds=(1,))], SamplingParams(max_tokens=2))[
            0, 0
        ].policy_version
        == 7
    )


def test_tokens_are_counted_before_the_first_completion_ends(policy):
    engine = NativeEngine(policy, max_slots=3)
    requests = [Request(prompt_ids=prompt, seeds=(1, 2, 3, 4)) for prompt in PROMPTS]
    seen = []
    with stage("sampling", total=4 * len(PROMPTS)) as sampling:
        for output in engine.generate(requests, SamplingParams(max_tokens=9)):
            seen.append((sampling.tokens, len(output.completion.token_ids)))
    assert seen[0][0] > seen[0][1] > 1  # those that go on are counted, too
    assert sampling.tokens == sum(length for _, length in seen)


def test_a_generator_left_halfway_keeps_gradients_on(policy):
    stream = NativeEngine(policy, 4).generate(
        [Request(prompt_ids=(4, 5), seeds=(1, 2, 3))], SamplingParams(max_tokens=9)
    )
    next(stream)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def test_hf_engine_has_the_trainers_logprobs_too(policy):
    engine = HFEngine(policy, 4, None)
    requests = [Request(prompt_ids=prompt, seeds=(1, 2)) for prompt in PROMPTS]
    done = collect(engine, requests, SamplingParams(max_tokens=12, temperature=0.8))
    assert len(done) == 6
    for (r, _), completion in done.items():
        expected = trainer_logprobs(policy, PROMPTS[r], completion, 0.8)
        assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-4)
    assert done == collect(engine, requests, SamplingParams(max_tokens=12, temperature=0.8))


@pytest.mark.parametrize("lora", [False, True])
def test_hf_engine_samples_without_the_models_own_settings(policy, lora):
    """What generation_config.json of a model says would fill what an engine leaves open."""
    policy = with_lora(policy) if lora else policy
    engine = HFEngine(policy, 4, "eager")
    requests = [Request(prompt_ids=prompt, seeds=(1, 2)) for prompt in PROMPTS]
    sampling = SamplingParams(max_tokens=12, temperature=0.8, ignore_eos=True)
    plain = collect(engine, requests, sampling)
    settings = {"repetition_penalty": 1.3, "min_new_tokens": 9, "suppress_tokens": [5, 7], "do_sample": True}
    settings |= {"no_repeat_ngram_size": 2, "bad_words_ids": [[9]], "top_k": 3, "begin_suppress_tokens": [8]}
    hostile = policy.lm.generation_config
    for key, value in settings.items():
        setattr(hostile, key, value)
    assert collect(engine, requests, sampling) == plain
    compare_with_trainer(engine, policy)
    assert policy.lm.generation_config is hostile and hostile.repetition_penalty == 1.3


def test_hf_engine_samples_as_the_native_one_in_any_batch(policy):
    """By transformers' own filters, and by each sample's own random numbers."""
    sampling = SamplingParams(
        max_tokens=10, temperature=0.7, top_k=20, top_p=0.9, min_p=0.02, ignore_eos=True
    )
    requests = [Request(prompt_ids=prompt, seeds=(1, 2, 3)) for prompt in PROMPTS]
    native = collect(NativeEngine(policy, 4), requests, sampling)
    for size in (1, 4, 64):
        done = collect(HFEngine(policy, size, "eager"), requests, sampling)
        assert {key: c.token_ids for key, c in done.items()} == {
            key: c.token_ids for key, c in native.items()
        }


# ---- the drawing of tokens --------------------------------------------------------------------------------

LOGITS = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()


def drawn(uniform, **settings):
    token, logprob = sample(LOGITS, torch.tensor([uniform]), SamplingParams(max_tokens=1, **settings))
    return token.item(), logprob.exp().item()


def test_a_uniform_number_picks_by_the_cumulative_distribution():
    # cumulative: 0.5, 0.8, 0.95, 1.0
    assert [drawn(u)[0] for u in (0.0, 0.49, 0.51, 0.79, 0.81, 0.94, 0.96, 0.9999999)] == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
    ]
    assert drawn(0.6)[1] == pytest.approx(0.3)


def test_filters_renormalize_what_they_leave():
    assert drawn(0.99, top_k=2) == (1, pytest.approx(0.3 / 0.8))
    assert drawn(0.99, top_p=0.9) == (
        2,
        pytest.approx(0.15 / 0.95),
    )  # 0.5 + 0.3 < 0.9: the third is still needed
    assert drawn(0.99, min_p=0.5) == (1, pytest.approx(0.3 / 0.8))  # at least half as likely as the likeliest
    assert drawn(0.99, top_p=0.01) == (0, pytest.approx(1.0))


def test_temperature_sharpens_and_greedy_takes_the_likeliest():
    # at temperature 0.5 probabilities are squared: 0.25, 0.09, 0.0225, 0.0025 of 0.365
    assert drawn(0.0, temperature=0.5)[1] == pytest.approx(0.25 / 0.365)
    assert drawn(0.99, temperature=0.0) == (0, pytest.approx(0.5))


EDGES = {"temperature": (0, 1e-6, 1e3), "top_p": (1e-6, 1), "top_k": (0, 1, 2**24), "min_p": (0, 1e-45, 1)}


@pytest.mark.parametrize("sampler", ["native", "hf"])
def test_parameters_at_their_bounds_give_probabilities(sampler):
    rows = torch.tensor([[-3e4, 3e4, 0.0, 1e-3], [5.0, 5.0, 5.0, float("-inf")]])
    for values in itertools.product(*EDGES.values()):
        params = SamplingParams(max_tokens=1, **dict(zip(EDGES, values, strict=True)))
        if sampler == "native":
            tokens, logprobs = sample(rows, torch.tensor([0.0, 0.999]), params)
        else:
            draw = _Sampler(torch.tensor([[0.0], [0.999]]), params)
            last: Any = LogitsProcessorList([*_filters(params), draw])
            tokens = last(None, rows).argmax(-1)
            [logprobs] = draw.logprobs
        assert logprobs.isfinite().all() and (logprobs <= 0).all(), params
        assert rows.gather(-1, tokens[:, None]).isfinite().all(), params


@pytest.mark.parametrize(
    "settings",
    [
        *({name: value} for name in EDGES for value in (-1, float("nan"), float("inf"), 1e9)),
        *({"temperature": value} for value in (1e-40, 1e-320, 9e-7)),
        *({"top_p": value} for value in (0, 1e-7)),
        {"max_tokens": 0},
    ],
)
def test_parameters_beyond_their_bounds_are_refused(settings):
    with pytest.raises(UserError, match=f"{next(iter(settings))} is .*: give .*a number from"):
        SamplingParams(**{"max_tokens": 1, **settings})


def test_logits_without_numbers_give_a_token_and_no_logprob():
    tokens, logprobs = sample(
        torch.full((1, 4), float("nan")), torch.tensor([0.5]), SamplingParams(max_tokens=1)
    )
    assert 0 <= tokens.item() < 4 and logprobs.isnan().all()


def test_a_token_without_probability_is_never_drawn():
    logits = torch.tensor([[0.0, float("-inf")]]).repeat(64, 1)
    uniform = torch.full((64,), 1.0)  # what rounding can make of a number just below 1
    assert sample(logits, uniform, SamplingParams(max_tokens=1))[0].tolist() == [0] * 64


def test_requests_with_own_parameters_join_and_leave(policy):
    come_and_leave(policy)


def test_new_weights_between_calls_leave_nothing_stale():
    new_weights_between_calls(make_policy("qwen2", max_position_embeddings=512))
