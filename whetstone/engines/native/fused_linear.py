"""Linear layers with the same input, fused into one matrix product for decoding.

Query, key and value (and the MLP's gate and up) become one matrix. The policy's parameters are moved next to
each other in memory and stay there: no copy exists, and an update of the policy updates the fused matrix. A
LoRA adapter is merged into a copy, refreshed after each update, if memory suffices; else it is applied in two
thin products. Over 4-bit weights it always is: they are dequantized for each product, as in the update. The
trained weights are never changed.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whetstone.model.adapters import AdapterLinear
from whetstone.model.lora import is_plain_lora
from whetstone.model.lora_products import add_product
from whetstone.model.nf4 import Nf4Linear, dequantize
from whetstone.model.rounding import stochastic_round

TILE, ALIGNMENT = 128, 8  # of cuBLAS kernels; in elements
MAX_ROWS, MAX_SPLITS, MIN_SPLIT_DEPTH = 256, 4, 1024


class FusedLinear:
    """One matrix (and bias) for several linear layers. `merge`: adapters may be merged into a copy."""

    def __init__(self, layers: list[Any], *, merge: bool = True):
        self.layers = layers
        adapted = any(not isinstance(layer, nn.Linear) for layer in layers)
        assert all(map(is_linear_or_lora, layers))
        self.is_copy = adapted and merge and not any(isinstance(layer, AdapterLinear) for layer in layers)
        with torch.no_grad():
            weights = [_base(layer).weight for layer in layers]
            self.weight = self._weights() if self.is_copy else _make_contiguous(weights)
            self.adapter = Adapter(layers) if adapted and not self.is_copy else None
            biases = [_base(layer).bias for layer in layers]
            self.bias: Tensor | None = None
            if any(bias is not None for bias in biases):
                self.bias = self._biases() if self._copies_bias() else _make_contiguous(biases)

    def __call__(self, x: Tensor) -> Tensor:
        if self.adapter is None:
            return F.linear(x, self._matrix(), self.bias)
        out = add_product(self.adapter.project(x) @ self.adapter.up, x, self._matrix())
        return out if self.bias is None else out + self.bias

    @property
    def has_no_bias_or_lora(self) -> bool:
        return self.bias is None and self.adapter is None

    def split_k(self, x: Tensor) -> Tensor:
        """The product, or [k, n, N] float32 partial sums that the caller adds up (split-K). With few rows the
        output tiles of a deep product do not fill the GPU; the splits do.
        """
        splits = self._num_splits(len(x))
        if splits == 1:
            return self(x)
        rows, columns = self.weight.shape
        depth = columns // splits
        lhs = x.view(len(x), splits, depth).transpose(0, 1)
        rhs = self.weight.view(rows, splits, depth).permute(1, 2, 0)
        return torch.bmm(lhs, rhs, out_dtype=torch.float32)

    def _num_splits(self, num_rows: int) -> int:
        weight = self.weight
        if not self.has_no_bias_or_lora or not weight.is_cuda or weight.dtype == torch.float32:
            return 1
        multiprocessors = torch.cuda.get_device_properties(weight.device).multi_processor_count
        rows, columns = weight.shape
        return num_splits(num_rows, rows, columns, multiprocessors)

    def _matrix(self) -> Tensor:
        return self.weight

    def _copies_bias(self) -> bool:
        return self.is_copy or any(_base(layer).bias is None for layer in self.layers)

    def refresh(self) -> None:
        """Update copies of the policy's weights; shared memory needs nothing."""
        with torch.no_grad():
            if self.is_copy:
                self.weight.copy_(self._weights())
            if self.bias is not None and self._copies_bias():
                self.bias.copy_(self._biases())
            if self.adapter is not None:
                self.adapter.refresh()

    def is_current(self) -> bool:
        """Whether the parameters still have the addresses that they were moved to."""
        if self.is_copy:
            return True
        address = self.weight.data_ptr()
        for layer in self.layers:
            weight = _base(layer).weight
            if weight.data_ptr() != address:
                return False
            address += weight.nbytes
        return True

    def _weights(self) -> Tensor:
        return torch.cat([_merged_weight(layer) for layer in self.layers])

    def _biases(self) -> Tensor:
        bases = map(_base, self.layers)
        zeros = self._matrix().new_zeros
        return torch.cat([zeros(base.out_features) if base.bias is None else base.bias for base in bases])


class FusedNf4Linear(FusedLinear):
    """The same for 4-bit layers. `weight` holds their codes, which no kernel for dense matrices takes."""

    def __init__(self, layers: list[Any]):
        self.layers, self.is_copy = layers, False
        bases = [_base(layer) for layer in layers]
        self.weight = _make_contiguous([base.codes for base in bases])
        self.scales = _make_contiguous([base.scales for base in bases])
        self.dtype = bases[0].dtype
        is_adapted = any(not isinstance(layer, nn.Linear) for layer in layers)
        self.adapter = Adapter(layers) if is_adapted else None
        self.bias = None if all(base.bias is None for base in bases) else self._biases()

    def split_k(self, x: Tensor) -> Tensor:
        return self(x)

    def _matrix(self) -> Tensor:
        return dequantize(self.weight, self.scales, self.dtype)

    def _copies_bias(self) -> bool:
        return True

    def is_current(self) -> bool:
        return self.weight.data_ptr() == _base(self.layers[0]).codes.data_ptr()


def fuse(layers: list[Any], *, merge: bool = True) -> FusedLinear:
    """One matrix for layers with the same input. `merge`: see `FusedLinear`."""
    if all(isinstance(_base(layer), Nf4Linear) for layer in layers):
        return FusedNf4Linear(layers)
    return FusedLinear(layers, merge=merge)


def num_splits(num_rows: int, rows: int, columns: int, multiprocessors: int) -> int:
    """Splits of a product of `num_rows` rows: at most one 128 x 128 tile per multiprocessor, and splits of at
    least 1024 columns. With more than 256 rows it is no faster (benchmarks/decode_products.py).
    """
    if num_rows > MAX_ROWS:
        return 1
    tiles = -(-num_rows // TILE) * -(-rows // TILE)
    splits = 1
    while (
        splits < MAX_SPLITS
        and 2 * splits * tiles <= multiprocessors
        and columns % (2 * splits * ALIGNMENT) == 0
        and columns // (2 * splits) >= MIN_SPLIT_DEPTH
    ):
        splits *= 2
    return splits


class Adapter:
    """LoRA adapters of several layers as two matrices: out += (x @ down.T) @ up, `up` block diagonal."""

    def __init__(self, layers: list[Any]):
        self.layers = layers
        downs = [down for layer in layers for down, _, _ in _lora_factors(layer)]
        rank, width = sum(map(len, downs)), sum(_base(layer).out_features for layer in layers)
        self.down = downs[0].new_zeros(rank, _base(layers[0]).in_features)
        self.up = self.down.new_zeros(rank, width)
        several = [layer for layer in layers if isinstance(layer, AdapterLinear)]
        self.selection = several[0].selection if several else None
        self.mask = torch.cat([layer.mask for layer in several], 1) if several else None
        self.refresh()

    def project(self, x: Tensor) -> Tensor:
        """x @ down.T; of several adapters only the columns that belong to the row's."""
        hidden = F.linear(x, self.down)
        if self.selection is None or self.mask is None:
            return hidden
        ids = self.selection.ids
        return torch.zeros_like(hidden) if ids is None else hidden.where(self.mask[ids], 0.0)

    def refresh(self) -> None:
        row = column = 0
        for layer in self.layers:
            size = _base(layer).out_features
            for down, up, scale in _lora_factors(layer):
                rank = down.shape[0]
                self.down[row : row + rank].copy_(down)
                self.up[row : row + rank, column : column + size].copy_(up.t() * scale)
                row += rank
            column += size


def _lora_factors(layer: Any) -> list[tuple[Tensor, Tensor, float]]:
    """(A, B, scale) of every active adapter."""
    if isinstance(layer, nn.Linear):
        return []
    if isinstance(layer, AdapterLinear):  # those of all its adapters, side by side
        return [(layer.down, layer.up, 1.0)]
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    return [(layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]) for name in names]


def is_linear_or_lora(layer: Any) -> bool:
    """Whether the layer is an `nn.Linear`, possibly with plain LoRA (no DoRA, no LoRA bias)."""
    return isinstance(layer, nn.Linear | AdapterLinear) or is_plain_lora(layer)


def _make_contiguous(parameters: list[nn.Parameter]) -> Tensor:
    """Move parameters into one contiguous tensor; they stay the same parameters."""
    if len(parameters) == 1:
        return parameters[0].data
    storage = torch.cat([parameter.data for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = storage[start : start + parameter.shape[0]]
        start += parameter.shape[0]
    return storage


def _base(layer: Any) -> Any:
    return layer if isinstance(layer, nn.Linear) else layer.get_base_layer()


def _merged_weight(layer: Any) -> Tensor:
    """The weight with its active adapters merged in. The sum is rounded stochastically: to the nearest, small
    updates would be lost, and the engine would sample from the base model.
    """
    weight = _base(layer).weight
    if isinstance(layer, nn.Linear):
        return weight
    merged = weight.float()
    for adapter in layer.active_adapters:
        if adapter in layer.lora_A:
            merged = merged + layer.get_delta_weight(adapter).float()
    return stochastic_round(merged, weight.dtype)
