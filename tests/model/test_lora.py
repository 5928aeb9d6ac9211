"""LoRA layers: the precision of the adapter, and our forward pass beside peft's own."""

import pytest
import torch
from peft.tuners.lora import Linear

from tests.conftest import make_policy
from whetstone.config.sections import ModelConfig
from whetstone.model.lora import add_lora


def lora_layers(dtype: torch.dtype, **settings) -> list[Linear]:
    torch.manual_seed(0)
    lm = make_policy().lm.to(dtype)
    model = add_lora(lm, ModelConfig(use_peft=True, lora_r=4, lora_alpha=12, **settings), None)
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    for layer in layers:
        with torch.no_grad():
            for parameter in layer.lora_B.parameters():
                parameter.normal_(std=0.1)
    return layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_adapter_has_the_precision_of_the_model(dtype: torch.dtype) -> None:
    layers = lora_layers(dtype)
    assert layers and all(p.dtype == dtype for layer in layers for p in layer.parameters())


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_forward_pass_is_pefts(dropout: float) -> None:
    for layer in lora_layers(torch.float32, lora_dropout=dropout):
        assert (type(layer) is Linear) == (dropout > 0)
        layer.eval()
        x = torch.randn(3, int(layer.in_features or 0))
        own = Linear.forward(layer, x)
        torch.testing.assert_close(layer(x), own, rtol=1e-5, atol=1e-6)
        assert not torch.equal(own, layer.base_layer(x))
        layer.enable_adapters(False)
        assert torch.equal(layer(x), layer.base_layer(x))
