"""8-bit products for rollouts: how far they are from the exact ones, and that they follow the weights."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.quantization import quantize_rows
from whetstone.config import build
from whetstone.engines.native import NativeEngine
from whetstone.engines.native.fp8 import FP8_MAX, Fp8Linear, supports_fp8
from whetstone.engines.native.fused_linear import FusedLinear
from whetstone.errors import UserError


def linears(*sizes: int) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(64, size, bias=False).bfloat16() for size in sizes]


def exact(x: torch.Tensor, layers: list) -> torch.Tensor:
    return x.double() @ torch.cat([layer.weight for layer in layers]).double().t()


def test_rounding_keeps_four_bits_and_the_largest_of_a_row():
    x = torch.tensor([[1.0, -0.3, 448.0, 0.02], [0.0, 0.0, 0.0, 0.0], [1e-3, -2e-3, 5e-4, 0.0]])
    values, scale = quantize_rows(x)
    assert scale.tolist() == pytest.approx([1.0, 1e-12, 2e-3 / FP8_MAX])
    # 8 steps between powers of two; below 2^-6 of the scale steps of 2^-9
    assert (values.float() * scale[:, None])[0].tolist() == pytest.approx([1.0, -0.3125, 448.0, 0.01953125])
    assert torch.allclose(values.float() * scale[:, None], x, rtol=2**-4, atol=2**-10 * float(scale[2]))


def test_a_product_is_near_the_exact_one_and_follows_the_weights():
    layers = linears(32, 16)
    joined = FusedLinear(layers)
    product = Fp8Linear(joined)
    x = torch.randn(5, 64)
    rounded = quantize_rows(x)
    for _ in range(2):
        values, scale = product(rounded)
        assert scale is rounded.scale  # left for whoever reads the product
        found, wanted = values.double() * scale[:, None].double(), exact(x, layers)
        assert 1e-3 < (found - wanted).norm() / wanted.norm() < 0.05
        # and it is the product of the rounded numbers, to bf16's rounding
        weight = product.weight.double() * product.scale.double()
        same = (rounded.values.double() * rounded.scale[:, None].double()) @ weight.t()
        assert torch.allclose(found, same, rtol=2**-7, atol=2**-9)
        with torch.no_grad():
            layers[1].weight.mul_(-3)
        product.refresh()


def test_adapters_are_merged_into_the_copy():
    import peft

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = linears(32, 16)

    model = Two()
    before = torch.cat([model.a.weight, model.b.weight]).clone()
    adapted: Any = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["a"], init_lora_weights=False)
    )
    layer: Any = adapted.base_model.model.a
    product = Fp8Linear(FusedLinear([layer, adapted.base_model.model.b], merge=False))
    merged = before.double()
    merged[:32] += layer.get_delta_weight("default").double()
    found = product.weight.double() * product.scale.double()
    assert 0 < (found - merged).norm() / merged.norm() < 0.05
    assert (before.double() - merged).norm() / merged.norm() > 0.1  # the adapter matters
    assert torch.equal(layer.get_base_layer().weight, before[:32])  # and the weights are as they were


def test_a_matrix_with_a_bias_or_an_odd_side_is_not_rounded():
    assert supports_fp8(FusedLinear(linears(32)))
    assert not supports_fp8(FusedLinear([nn.Linear(64, 32)]))
    assert not supports_fp8(FusedLinear([nn.Linear(64, 24, bias=False)]))


def test_importance_weights_by_default_for_rounded_weights():
    assert build({}).loss.importance_correction == "none"
    assert build({"rollout_quantization": "fp8"}).loss.importance_correction == "token_truncate"
    chosen = build({"rollout_quantization": "fp8", "importance_correction": "none"})
    assert chosen.loss.importance_correction == "none"


def test_what_cannot_round_says_so(policy):
    with pytest.raises(UserError, match=r"rollout_quantization=fp8.*GPU"):
        NativeEngine(policy, 2, fp8=True)
    with pytest.raises(UserError, match=r"rollout_quantization.*hf"):
        build({"rollout_quantization": "fp8", "rollout_engine": "hf"})
