"""Several linear layers as one product: their own memory, LoRA merged into a copy or applied on the fly."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.conftest import make_policy
from tests.support.update import share_kept, with_small_adapter
from whetstone.engines.native.fused_linear import FusedLinear, is_linear_or_lora, num_splits


class Three(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 24), nn.Linear(16, 8, bias=False), nn.Linear(16, 8)

    def forward(self, x):
        return torch.cat([self.q(x), self.k(x), self.v(x)], -1)


def adapted(**settings) -> Any:
    torch.manual_seed(0)
    model = get_peft_model(
        Three(), LoraConfig(**{"r": 4, "lora_alpha": 10, "target_modules": ["q", "v"], **settings})
    )
    change(model)
    return model


def change(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}])
def test_joined_layers_with_adapters_give_what_the_layers_give(merge, settings):
    model = adapted(**settings)
    three = model.base_model.model
    joined = FusedLinear([three.q, three.k, three.v], merge=merge)
    assert joined.is_copy == merge
    if not merge:
        assert joined.weight.data_ptr() == three.q.get_base_layer().weight.data_ptr()
    x = torch.randn(5, 16)
    with torch.no_grad():
        assert torch.allclose(joined(x), model(x), atol=1e-5)
        change(model)
        assert not torch.allclose(joined(x), model(x), atol=1e-2)
        joined.refresh()
        assert torch.allclose(joined(x), model(x), atol=1e-5)
    assert joined.is_current()


@pytest.mark.parametrize("merge", [True, False])
def test_a_small_adapter_is_not_rounded_away(merge: bool) -> None:
    policy = with_small_adapter(make_policy("qwen2", hidden_size=256))
    attention = policy.layers[0].self_attn
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    joined = FusedLinear(layers, merge=merge)
    x = torch.randn(200, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad():
        base = torch.cat([layer.base_layer(x) for layer in layers], 1)
        change = torch.cat([x.float() @ layer.get_delta_weight("default").float().t() for layer in layers], 1)
        assert abs(share_kept(joined(x), base, change) - 1) < 0.2
        nearest = torch.cat([layer.base_layer.weight + layer.get_delta_weight("default") for layer in layers])
        assert share_kept(F.linear(x, nearest, joined.bias), base, change) < 0.4


def test_layers_without_adapters_share_the_memory_of_the_policy():
    three = Three()
    joined = FusedLinear([three.q, three.k])
    with torch.no_grad():
        three.k.weight.add_(1.0)
        x = torch.randn(2, 16)
        assert torch.allclose(joined(x), three(x)[:, :32], atol=1e-6)
    three.k.weight.data = three.k.weight.data.clone()
    assert not joined.is_current()


def test_an_adapter_that_is_more_than_two_matrices_is_known():
    plain, dora = adapted().base_model.model, adapted(use_dora=True).base_model.model
    assert is_linear_or_lora(plain.q) and is_linear_or_lora(plain.k) and not is_linear_or_lora(dora.q)


def test_parts_of_a_product_fill_the_chip_and_no_more():
    assert num_splits(256, 1536, 8960, 132) == 4  # 2 x 12 tiles, times 4: 96 of 132
    assert num_splits(257, 1536, 8960, 132) == 1  # nothing is gained
    assert num_splits(256, 4096, 8960, 132) == 2  # 64 tiles
    assert num_splits(16, 896, 4864, 132) == 4
    assert num_splits(16, 1536, 1536, 132) == 1  # halves would be shorter than 1024
    assert num_splits(16, 1536, 1500 * 4, 132) == 2  # quarters would begin at odd places
