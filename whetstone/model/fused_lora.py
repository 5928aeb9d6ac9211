"""LoRA with fewer and larger matrix products: the same numbers, but for rounding.

Layers with the same input are one product: query, key and value, and the MLP's gate and up. A layer alone
computes W x + B A x, three products and a sum, and the sum reads and writes outputs of gate and up that are
six times as wide as x. Together they are [W, B] [x, A x]: A of all layers is one thin product, the sum takes
place inside the large one, and so does the product of B and dy of the backward pass.

Where x is as wide as the output or wider, as in the MLP's down, the sum of the backward pass is inside a
product.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whetstone.model.lora import short_linear

SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # of one parent


def fuse_lora(layers: Iterable[nn.Module]) -> None:
    """From now on LoRA layers with the same input compute together; a wide input has a faster gradient."""
    for layer in layers:
        for parent in layer.modules():
            for names in SAME_INPUT:
                members: list[Any] = [getattr(parent, name, None) for name in names]
                if all(map(_can_be_fused, members)) and all(
                    member.scaling == members[0].scaling for member in members
                ):
                    group = LoraGroup(members)
                    for member in members:
                        member.compute = group
        modules: list[Any] = list(layer.modules())
        for member in modules:
            if _can_be_fused(member) and member.compute is None and _has_wide_input(member):
                member.compute = wide_lora


def _can_be_fused(layer: Any) -> bool:
    return type(layer) is short_linear() and type(layer.base_layer) is nn.Linear


def _has_wide_input(layer: Any) -> bool:
    return layer.in_features >= layer.out_features


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
        outputs = _GroupedProduct.apply(rows, scale, down, *(base.weight for base in bases), *ups)
        outputs = [output.view(*x.shape[:-1], -1) for output in outputs]
        return tuple(
            out if base.bias is None else out + base.bias for out, base in zip(outputs, bases, strict=True)
        )


def wide_lora(layer: Any, x: Tensor) -> Tensor:
    """The output of a layer whose input is wide."""
    base, name = layer.base_layer, layer.active_adapters[0]
    rows, scale = x.reshape(-1, x.shape[-1]), layer.scaling[name]
    output = _WideProduct.apply(
        rows, scale, base.weight, layer.lora_A[name].weight, layer.lora_B[name].weight
    )
    output = output.view(*x.shape[:-1], -1)
    return output if base.bias is None else output + base.bias


class _GroupedProduct(torch.autograd.Function):
    """[T, in] -> a [T, out] of each layer, W x + B A x, where only A and B are trained."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, down: Tensor, *matrices: Tensor) -> tuple[Tensor, ...]:
        weights, ups = matrices[: len(matrices) // 2], matrices[len(matrices) // 2 :]
        # The norm before it writes into `both` at once: no kernel copies x beside A x.
        width = x.shape[1]
        both = F.pad(x, (0, len(down)))
        both = torch.slice_scatter(both, F.linear(both[:, :width], down) * scale, dim=1, start=width)
        ctx.scale = scale
        ctx.save_for_backward(both, down, *matrices)
        output = F.linear(both, _joined(weights, ups))
        return output.split([len(weight) for weight in weights], dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        both, down, *matrices = ctx.saved_tensors
        weights, ups = matrices[: len(matrices) // 2], matrices[len(matrices) // 2 :]
        sizes = [down.shape[1], len(down)]
        x, inner = both.split(sizes, dim=1)
        x_gradient, inner_gradient = _product(gradients, _joined(weights, ups)).split(sizes, dim=1)
        inners = inner.split([up.shape[1] for up in ups], dim=1)
        up_gradients = [out.T @ part for out, part in zip(gradients, inners, strict=True)]
        inner_gradient = inner_gradient * ctx.scale
        x_gradient = x_gradient + inner_gradient @ down
        return x_gradient, None, inner_gradient.T @ x, *[None] * len(weights), *up_gradients


class _WideProduct(torch.autograd.Function):
    """[T, in] -> [T, out], W x + B A x, where only A and B are trained."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
        inner = F.linear(x, down) * scale
        ctx.scale = scale
        ctx.save_for_backward(x, inner, weight, down, up)
        return F.linear(x, weight) + F.linear(inner, up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, inner, weight, down, up = ctx.saved_tensors
        [gradient] = gradients
        inner_gradient = (gradient @ up) * ctx.scale
        x_gradient = torch.cat([gradient, inner_gradient], dim=1) @ torch.cat([weight, down])
        return x_gradient, None, None, inner_gradient.T @ x, gradient.T @ inner


def _product(parts: tuple[Tensor, ...], matrix: Tensor) -> Tensor:
    """The parts side by side, times the matrix. Wide parts are not copied together: products are summed."""
    if min(part.shape[1] for part in parts) < matrix.shape[1] // 2:
        return torch.cat(parts, dim=1) @ matrix
    first, *others = matrix.split([part.shape[1] for part in parts])
    total = parts[0] @ first
    for part, rows in zip(parts[1:], others, strict=True):
        total = torch.addmm(total, part, rows)
    return total


def _joined(weights: Any, ups: Any) -> Tensor:
    """[[W1, B1, 0], [W2, 0, B2]]"""
    return torch.cat([torch.cat(tuple(weights)), torch.block_diag(*ups)], dim=1)
