"""4-bit weights: the numbers of bitsandbytes, gradients through them, and the engine on the same numbers."""

import pytest
import torch
import torch.nn.functional as F

from tests.conftest import make_policy
from tests.support.engines import compare_with_trainer
from tests.support.update import flat_gradient, make_samples, reference_gradient
from whetstone.config import build, make_plan
from whetstone.config.sections import ModelConfig
from whetstone.engines.native import NativeEngine
from whetstone.engines.native.fused_linear import FusedNf4Linear, fuse
from whetstone.errors import UserError
from whetstone.model.lora import add_lora
from whetstone.model.nf4 import BLOCK, LEVELS, Nf4Linear, dequantize, quantize, quantize_model
from whetstone.model.policy import Policy, load_policy
from whetstone.model.size import num_parameters
from whetstone.update.packing import pack
from whetstone.update.updater import Updater

CPU = torch.device("cpu")


def test_nf4_weight_is_nearest_level_times_absmax() -> None:
    weight = torch.randn(3, 2 * BLOCK, generator=torch.Generator().manual_seed(0))
    weight[1, :BLOCK] = 0  # a block without a scale
    codes, scales = quantize(weight)
    assert codes.shape == (3, BLOCK) and codes.dtype == torch.uint8 and scales.shape == (3, 2)
    values = dequantize(codes, scales, torch.float32)
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    for row in range(3):
        for block in range(2):
            part = slice(block * BLOCK, (block + 1) * BLOCK)
            given = weight[row, part].double()
            scale = given.abs().max()
            nearest = levels[(given[:, None] - levels * scale).abs().argmin(1)] * scale
            torch.testing.assert_close(values[row, part].double(), nearest, rtol=1e-6, atol=0)


# What bitsandbytes 0.50.2 makes of the weights below: quantize_4bit(weight, blocksize=64, quant_type="nf4").
PACKED = (
    "79658955a846b739b44ba35c728d42cb24d918e51cd23ea16e51be21ec05f70ad42cb25d818d42cc23e917e51bd22eb1"
    "6e61be21ec14f809f31dd13f908f40de23ea16e61be22db15e71ae31dd14e808e41de12ea07f50ce11ec05f60bf21ed0"
    "4e819e31dd13e917e41ce12eb06f60be21ec05f70af21ed13f908f30de12fb07"
)
ABSMAX = [0.555079996585846, 0.999294638633728, 1.4544785022735596, 1.9641716480255127]


def test_codes_and_scales_are_those_of_bitsandbytes() -> None:
    weight = torch.sin(torch.arange(256) * 1.7).mul(torch.linspace(0.1, 2, 256)).view(2, 2 * BLOCK)
    codes, scales = quantize(weight)
    assert bytes(codes.flatten().tolist()).hex() == PACKED
    torch.testing.assert_close(scales.flatten(), torch.tensor(ABSMAX), rtol=1e-6, atol=0)
    assert dequantize(codes, scales, torch.float32).double().sum() == pytest.approx(-1.5686307474970818)


def test_nf4_layer_keeps_no_dequantized_copy() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(128, 48)
    layer = Nf4Linear(linear, CPU)
    x = torch.randn(5, 128, requires_grad=True)
    out = layer(x)
    assert torch.equal(out, F.linear(x, layer.weight, layer.bias))
    assert torch.equal(out.grad_fn.saved_tensors[0], layer.codes)
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    torch.testing.assert_close(grad, 2 * out @ layer.weight)
    assert num_parameters(layer) == num_parameters(linear)
    assert (layer.weight - linear.weight).norm() / linear.weight.norm() < 0.1  # 4 bits of a matrix


def nf4_policy() -> Policy:
    """A tiny model in 4 bits with an adapter that is not 0."""
    plain = make_policy(hidden_size=64, intermediate_size=128)
    quantize_model(plain.lm, CPU)
    model = add_lora(plain.lm, ModelConfig(use_peft=True, lora_r=4, lora_alpha=12, load_in_4bit=True), None)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    policy = Policy(model, plain.tokenizer, CPU)
    policy.verify()
    assert policy.is_packed
    return policy


def test_all_linear_layers_but_the_output_are_in_4_bits() -> None:
    policy = load_policy(ModelConfig(use_peft=True, load_in_4bit=True, device="cpu"))
    layers = [module for module in policy.model.modules() if isinstance(module, Nf4Linear)]
    assert len(layers) == 7 * policy.config.num_hidden_layers
    assert not isinstance(policy.lm.get_output_embeddings(), Nf4Linear)
    assert all(p.dtype == torch.float32 for p in policy.parameters())
    plain = load_policy(ModelConfig(use_peft=True, device="cpu"))
    assert num_parameters(policy.model) == num_parameters(plain.model)


def test_the_gradient_of_the_adapter_is_that_of_a_float64_pass() -> None:
    policy = nf4_policy()
    samples = make_samples(policy)
    # The reference computes with whole matrices of the same values, in float64.
    whole = nf4_policy()
    for parent in list(whole.model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Nf4Linear):
                linear = torch.nn.Linear(child.in_features, child.out_features, bias=child.bias is not None)
                linear.weight.data = child.weight
                setattr(parent, name, linear.requires_grad_(False))
    expected = reference_gradient(whole, samples, "dapo", 1.0)
    config = build({"num_generations": 6, "prompts_per_step": 1, "max_steps": 4, "scale_rewards": "none"})
    updater = Updater(policy, config, make_plan(config, num_problems=10), None)
    updater.gradient(updater.experience_builder.build([pack(samples, 60)], num_generations=6, beta=0.0)[0])
    torch.testing.assert_close(flat_gradient(policy), expected, rtol=1e-4, atol=1e-6)


def test_the_engine_samples_from_the_numbers_that_are_trained() -> None:
    policy = nf4_policy()
    compare_with_trainer(NativeEngine(policy, max_slots=3), policy)


def test_the_fused_layer_is_its_layers_side_by_side() -> None:
    attention = nf4_policy().layers[0].self_attn
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    x = torch.randn(3, layers[0].in_features)
    expected = torch.cat([layer(x) for layer in layers], 1)
    fused = fuse(layers)
    assert isinstance(fused, FusedNf4Linear) and fused.is_current()
    with torch.no_grad():
        torch.testing.assert_close(fused(x), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(torch.cat([layer(x) for layer in layers], 1), expected)  # after they moved
        layers[0].lora_B["default"].weight += 1
        fused.refresh()
        torch.testing.assert_close(fused.split_k(x), torch.cat([layer(x) for layer in layers], 1))


def test_indivisible_layers_and_routers_keep_precision() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd, self.even = torch.nn.Linear(65, 4), torch.nn.Linear(64, 4)
            self.gate, self.head = torch.nn.Linear(64, 4), torch.nn.Linear(64, 4)

        def get_output_embeddings(self) -> torch.nn.Module:
            return self.head

    model = Model()
    quantize_model(model, CPU)
    assert [name for name, child in model.named_children() if isinstance(child, Nf4Linear)] == ["even"]


@pytest.mark.parametrize(
    "settings",
    [
        {"use_peft": False},
        {"use_dora": True},
        {"rollout_engine": "vllm"},
        {"rollout_engine": "sglang"},
        {"rollout_quantization": "fp8"},
    ],
    ids=str,
)
def test_what_can_not_be_combined_is_refused(settings) -> None:
    with pytest.raises(UserError, match="load_in_4bit"):
        build({"use_peft": True, "load_in_4bit": True, **settings})
