"""The matrices that decoding multiplies with, joined where one product can do the work of several.

Queries, keys and values (and the MLP's gate and up) become one matrix. Where the policy's own parameters can
simply be laid side by side in memory, they are moved there: no copy exists, and an update of the policy is an
update of these. Where that can't be (a LoRA adapter that must be merged in), a joined copy is kept and
refreshed after each update; the weights that train are never touched.
"""

from typing import Any

import torch
from torch import Tensor, nn


class Joined:
    """One matrix (and bias) for several linear layers with the same input."""

    def __init__(self, layers: list[Any]):
        self.layers = layers
        self.is_copy = any(not isinstance(layer, nn.Linear) for layer in layers)
        with torch.no_grad():
            self.weight = self._weights() if self.is_copy else _side_by_side([m.weight for m in layers])
            biases = [_base(layer).bias for layer in layers]
            self.bias: Tensor | None = None
            if any(bias is not None for bias in biases):
                self.bias = self._biases() if self._copies_bias() else _side_by_side(biases)

    def _copies_bias(self) -> bool:
        return self.is_copy or any(_base(layer).bias is None for layer in self.layers)

    def refresh(self) -> None:
        """Take over what the policy's layers are now; nothing to do where the memory is the same."""
        with torch.no_grad():
            if self.is_copy:
                self.weight.copy_(self._weights())
            if self.bias is not None and self._copies_bias():
                self.bias.copy_(self._biases())

    def is_current(self) -> bool:
        """Whether the parameters still lie where they were put (something may have replaced them)."""
        if self.is_copy:
            return True
        address = self.weight.data_ptr()
        for layer in self.layers:
            if layer.weight.data_ptr() != address:
                return False
            address += layer.weight.numel() * layer.weight.element_size()
        return True

    def _weights(self) -> Tensor:
        return torch.cat([_effective(layer) for layer in self.layers])

    def _biases(self) -> Tensor:
        parts = []
        for layer in self.layers:
            base = _base(layer)
            parts.append(base.weight.new_zeros(base.weight.shape[0]) if base.bias is None else base.bias)
        return torch.cat(parts)


def _side_by_side(parameters: list[nn.Parameter]) -> Tensor:
    """Move parameters into one block of memory, one after the other; they stay the same parameters."""
    if len(parameters) == 1:
        return parameters[0].data
    block = torch.cat([parameter.data for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = block[start : start + parameter.shape[0]]
        start += parameter.shape[0]
    return block


def _base(layer: Any) -> Any:
    return layer if isinstance(layer, nn.Linear) else layer.get_base_layer()


def _effective(layer: Any) -> Tensor:
    """The weight with its active adapters merged in, computed in float32."""
    weight = _base(layer).weight
    if isinstance(layer, nn.Linear):
        return weight
    merged = weight.float()
    for adapter in layer.active_adapters:
        if adapter in layer.lora_A:
            merged = merged + layer.get_delta_weight(adapter).float()
    return merged.to(weight.dtype)
