"""The matrices that decoding multiplies with, joined where one product can do the work of several.

Queries, keys and values (and the MLP's gate and up) become one matrix. The policy's own parameters are laid
side by side in memory, where they stay: no copy exists, and an update of the policy is an update of these.
A LoRA adapter is merged into a joined copy, refreshed after each update, where there is memory for that;
else it is applied on the fly, two thin products more. The weights that train are never touched.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TILE, ALIGNED = 128, 8  # of the library's products; numbers that a row must begin at a multiple of
MOST_ROWS, MOST_PARTS, SHORTEST_PART = 256, 4, 1024


class Joined:
    """One matrix (and bias) for several linear layers with the same input. `merge`: adapters may be merged
    into a copy.
    """

    def __init__(self, layers: list[Any], *, merge: bool = True):
        self.layers = layers
        adapted = any(not isinstance(layer, nn.Linear) for layer in layers)
        assert all(map(is_plain, layers))
        self.is_copy = adapted and merge
        with torch.no_grad():
            own = [_base(layer).weight for layer in layers]
            self.weight = self._weights() if self.is_copy else _side_by_side(own)
            self.adapter = Adapter(layers) if adapted and not self.is_copy else None
            biases = [_base(layer).bias for layer in layers]
            self.bias: Tensor | None = None
            if any(bias is not None for bias in biases):
                self.bias = self._biases() if self._copies_bias() else _side_by_side(biases)

    def __call__(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        if self.adapter is not None:
            out.addmm_(F.linear(x, self.adapter.down), self.adapter.up)
        return out

    @property
    def is_bare(self) -> bool:
        """Whether it is a matrix and nothing else."""
        return self.bias is None and self.adapter is None

    def in_parts(self, x: Tensor) -> Tensor:
        """The product, or [k, n, N] float32 parts of it that the caller adds up. A few rows times a matrix of
        many columns occupy too little of a chip; a sum over a part of the columns each occupies it all, and
        whoever reads the product can add while it reads.
        """
        parts = self._parts(len(x))
        if parts == 1:
            return self(x)
        rows, columns = self.weight.shape
        depth = columns // parts
        left = x.view(len(x), parts, depth).transpose(0, 1)
        right = self.weight.view(rows, parts, depth).permute(1, 2, 0)
        return torch.bmm(left, right, out_dtype=torch.float32)

    def _parts(self, num_rows: int) -> int:
        weight = self.weight
        if not self.is_bare or not weight.is_cuda or weight.dtype == torch.float32:
            return 1
        multiprocessors = torch.cuda.get_device_properties(weight.device).multi_processor_count
        rows, columns = weight.shape
        return num_parts(num_rows, rows, columns, multiprocessors)

    def _copies_bias(self) -> bool:
        return self.is_copy or any(_base(layer).bias is None for layer in self.layers)

    def refresh(self) -> None:
        """Take over what the policy's layers are now; nothing to do where the memory is the same."""
        with torch.no_grad():
            if self.is_copy:
                self.weight.copy_(self._weights())
            if self.bias is not None and self._copies_bias():
                self.bias.copy_(self._biases())
            if self.adapter is not None:
                self.adapter.refresh()

    def is_current(self) -> bool:
        """Whether the parameters still lie where they were put (something may have replaced them)."""
        if self.is_copy:
            return True
        address = self.weight.data_ptr()
        for layer in self.layers:
            weight = _base(layer).weight
            if weight.data_ptr() != address:
                return False
            address += weight.numel() * weight.element_size()
        return True

    def _weights(self) -> Tensor:
        return torch.cat([_effective(layer) for layer in self.layers])

    def _biases(self) -> Tensor:
        parts = []
        for layer in self.layers:
            base = _base(layer)
            parts.append(base.weight.new_zeros(base.weight.shape[0]) if base.bias is None else base.bias)
        return torch.cat(parts)


def num_parts(num_rows: int, rows: int, columns: int, multiprocessors: int) -> int:
    """Parts of a product of `num_rows` rows: tiles of 128 x 128 for every multiprocessor at the most, and
    parts long enough to be worth one. With more than 256 rows nothing is gained (measured by
    benchmarks/decode_products.py).
    """
    if num_rows > MOST_ROWS:
        return 1
    tiles = -(-num_rows // TILE) * -(-rows // TILE)
    parts = 1
    while (
        parts < MOST_PARTS
        and 2 * parts * tiles <= multiprocessors
        and columns % (2 * parts * ALIGNED) == 0
        and columns // (2 * parts) >= SHORTEST_PART
    ):
        parts *= 2
    return parts


class Adapter:
    """The adapters of several layers as two thin matrices: out += (x @ down.T) @ up, each layer's rank with
    columns of its own.
    """

    def __init__(self, layers: list[Any]):
        self.layers = layers
        base = _base(layers[0]).weight
        ranks = [down.shape[0] for layer in layers for down, _, _ in _factors(layer)]
        width = sum(_base(layer).weight.shape[0] for layer in layers)
        self.down = base.new_zeros(sum(ranks), base.shape[1])
        self.up = base.new_zeros(sum(ranks), width)
        self.refresh()

    def refresh(self) -> None:
        row = column = 0
        for layer in self.layers:
            size = _base(layer).weight.shape[0]
            for down, up, scale in _factors(layer):
                rank = down.shape[0]
                self.down[row : row + rank].copy_(down)
                self.up[row : row + rank, column : column + size].copy_(up.t() * scale)
                row += rank
            column += size


def _factors(layer: Any) -> list[tuple[Tensor, Tensor, float]]:
    """(A, B, scale) of every active adapter."""
    if isinstance(layer, nn.Linear):
        return []
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    return [(layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]) for name in names]


def is_plain(layer: Any) -> bool:
    """Whether the layer is a matrix, with LoRA as it was first written or without."""
    if isinstance(layer, nn.Linear):
        return True
    from peft.tuners.lora import Linear

    return type(layer) is Linear and not layer.lora_variant and not any(layer.lora_bias.values())


def adapted_bytes(layers: list[Any]) -> int:
    """What copies of the layers with adapters would take."""
    return sum(
        _base(layer).weight.numel() * _base(layer).weight.element_size()
        for layer in layers
        if not isinstance(layer, nn.Linear)
    )


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
