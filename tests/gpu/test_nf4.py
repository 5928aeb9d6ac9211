"""4-bit weights on a real GPU: the kernel beside the CPU, compiled layers, and the engine's graphs."""

import pytest
import torch

from tests.conftest import make_policy
from tests.support.engines import PROMPTS, collect
from tests.support.gpu import WIDE
from tests.support.update import make_samples, train_on, updater_for
from whetstone.config.sections import ModelConfig
from whetstone.engines.base import Request, SamplingParams
from whetstone.engines.native import NativeEngine
from whetstone.engines.native.decode_step import FusedStep
from whetstone.engines.native.fused_linear import FusedNf4Linear
from whetstone.engines.native.gpu import PagedEngine
from whetstone.model.compilation import compile_layers
from whetstone.model.lora import add_lora
from whetstone.model.nf4 import BLOCK, dequantize, quantize, quantize_model
from whetstone.model.policy import Policy
from whetstone.update.packing import pack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
CUDA = torch.device("cuda")


def nf4_policy(architecture: str) -> Policy:
    plain = make_policy(architecture, **WIDE)
    lm = plain.lm
    quantize_model(lm, CUDA)
    model = add_lora(lm.to(CUDA), ModelConfig(use_peft=True, lora_r=8, load_in_4bit=True), None)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            noise = 0.1 * torch.randn(parameter.shape, generator=generator)
            parameter.data = noise.to(parameter)
    return Policy(model, plain.tokenizer, CUDA)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_gives_the_numbers_of_the_cpu(dtype: torch.dtype) -> None:
    weight = torch.randn(77, 5 * BLOCK, generator=torch.Generator().manual_seed(0)).to(dtype)
    codes, scales = quantize(weight)
    on_device = quantize(weight.cuda())
    assert torch.equal(on_device[0].cpu(), codes) and torch.equal(on_device[1].cpu(), scales)
    assert torch.equal(dequantize(*on_device, dtype).cpu(), dequantize(codes, scales, dtype))


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_the_engine_samples_from_the_numbers_that_are_trained(architecture: str) -> None:
    policy = nf4_policy(architecture)
    policy.verify()
    engine = NativeEngine(policy, 4)
    requests = [Request(prompt_ids=prompt, seeds=(1, 2, 3)) for prompt in PROMPTS]
    collect(engine, requests, SamplingParams(max_tokens=8))
    assert isinstance(engine.engine, PagedEngine)
    step = engine.engine.step
    assert isinstance(step, FusedStep)
    assert all(isinstance(linear, FusedNf4Linear) for linear in step.decoder.linears())
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-2)
    engine.update_weights(1)
    sampled = collect(engine, requests, SamplingParams(max_tokens=40, ignore_eos=True))
    for (number, _), completion in sampled.items():
        ids = torch.tensor([*PROMPTS[number], *completion.token_ids], device="cuda")
        policy.set_attention("eager")
        with torch.no_grad():
            logprobs = policy.lm(input_ids=ids[None]).logits[0].float().log_softmax(-1)
        policy.restore_attention()
        rows = torch.arange(len(PROMPTS[number]) - 1, len(ids) - 1, device="cuda")
        expected = logprobs[rows, ids[len(PROMPTS[number]) :]].cpu()
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=2e-3)


def test_compiled_layers_have_the_gradient_of_plain_ones() -> None:
    gradients = []
    for compiled in (False, True):
        policy = nf4_policy("llama")
        if compiled:
            compile_layers(policy)
        updater = updater_for(policy)
        updater.optimizer.step = lambda norm, of=updater: gradients.append(
            torch.cat([g.double().flatten().cpu() for g in of.optimizer.gradients()])
        )
        train_on(updater, [pack(make_samples(make_policy("llama")), 1000)])
    plain, fast = gradients
    assert plain.norm() > 0 and (fast - plain).norm() / plain.norm() < 1e-4
