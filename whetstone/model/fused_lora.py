"""LoRA with fewer and larger matrix products: the same numbers, but for rounding.

Layers with the same input are one product: query, key and value, and the MLP's gate and up. A layer alone
computes W x + B A x, three products and a sum, and the sum reads and writes outputs of gate and up that are
six times as wide as x. Together they are [W, B] [x, A x]: A of all layers is one thin product, the sum takes
place inside the large one, and so does the product of B and dy of the backward pass.

Where x is as wide as the output or wider, as behind the attention, the sum of the backward pass is inside a
product. A whole MLP: gated_lora.py.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from whetstone.model.gated_lora import gated_class, is_gated_mlp
from whetstone.model.lora import is_short
from whetstone.model.lora_products import GroupedProduct, WideProduct

SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # of one parent


def fuse_lora(layers: Iterable[nn.Module]) -> None:
    """From now on LoRA layers with the same input compute together; a wide input has a faster gradient."""
    for layer in layers:
        for parent in layer.modules():
            for names in SAME_INPUT:
                members: list[Any] = [getattr(parent, name, None) for name in names]
                if all(map(is_short, members)) and all(
                    member.scaling == members[0].scaling for member in members
                ):
                    group = LoraGroup(members)
                    for member in members:
                        member.compute = group
        modules: list[Any] = list(layer.modules())
        for member in modules:
            if is_short(member) and member.compute is None and member.in_features >= member.out_features:
                member.compute = wide_lora
            if is_gated_mlp(member):
                member.__class__ = gated_class(type(member))


class LoraGroup:
    """The first layer that is called computes the outputs of all; the others take theirs.

    Which layers of a model get the same input is seen from the tensor itself, so nothing is assumed of the
    forward pass around them.
    """

    def __init__(self, layers: list[Any]):
        self.layers = layers
        self.input: Tensor | None = None
        self.outputs: dict[int, Tensor] = {}

    def __call__(self, layer: Any, x: Tensor) -> Tensor:
        position = next(i for i, member in enumerate(self.layers) if member is layer)
        if self.input is not x or position not in self.outputs:
            self.input, self.outputs = x, dict(enumerate(self._outputs(x)))
        output = self.outputs.pop(position)
        if not self.outputs:
            self.input = None  # it would live as long as the model
        return output

    def _outputs(self, x: Tensor) -> tuple[Tensor, ...]:
        bases = [layer.base_layer for layer in self.layers]
        name = self.layers[0].active_adapters[0]
        down = torch.cat([layer.lora_A[name].weight for layer in self.layers])
        ups = [layer.lora_B[name].weight for layer in self.layers]
        rows, scale = x.reshape(-1, x.shape[-1]), self.layers[0].scaling[name]
        outputs = GroupedProduct.apply(rows, scale, down, *(base.weight for base in bases), *ups)
        outputs = [output.view(*x.shape[:-1], -1) for output in outputs]
        return tuple(
            out if base.bias is None else out + base.bias for out, base in zip(outputs, bases, strict=True)
        )


def wide_lora(layer: Any, x: Tensor) -> Tensor:
    """The output of a layer whose input is wide."""
    base, name = layer.base_layer, layer.active_adapters[0]
    rows, scale = x.reshape(-1, x.shape[-1]), layer.scaling[name]
    output = WideProduct.apply(rows, scale, base.weight, layer.lora_A[name].weight, layer.lora_B[name].weight)
    output = output.view(*x.shape[:-1], -1)
    return output if base.bias is None else output + base.bias
