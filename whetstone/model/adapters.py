"""Several LoRA adapters over one base model, each row of a batch with its own: for a server.

A linear layer with adapters computes `x W + (x A where mask) B`: A and B hold the matrices of all adapters
side by side, and the mask of a row is true in the columns of its adapter. So one forward pass serves requests
for different adapters, and the base is in memory once. The mask of a row without an adapter is all false.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whetstone.errors import UserError
from whetstone.model.lora import adapted_linear, is_plain_lora, read_adapter


class AdapterSelection:
    """The adapters of a model by number (0: none), and which of them the rows of a forward pass use."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.numbers = {name: number for number, name in enumerate(names, 1)}
        self.ids: Tensor | None = None  # of every row, in the shape of the token ids; None: no adapter

    @contextlib.contextmanager
    def rows(self, ids: Tensor) -> Iterator[None]:
        self.ids = ids
        try:
            yield
        finally:
            self.ids = None


class AdapterLinear(nn.Module):
    def __init__(
        self, base: nn.Linear, factors: Mapping[int, tuple[Tensor, Tensor]], selection: AdapterSelection
    ) -> None:
        """`factors`: number of an adapter -> A [rank, in] and B [out, rank], scaled."""
        super().__init__()
        self.base, self.selection = base, selection
        downs, ups = zip(*factors.values(), strict=True)
        mask = torch.zeros(len(selection.numbers) + 1, sum(map(len, downs)), dtype=torch.bool)
        column = 0
        for number, down in zip(factors, downs, strict=True):
            mask[number, column : column + len(down)] = True
            column += len(down)
        self.down: Tensor
        self.up: Tensor
        self.mask: Tensor
        self.register_buffer("down", torch.cat(downs), persistent=False)
        self.register_buffer("up", torch.cat(ups, 1), persistent=False)
        self.register_buffer("mask", mask.to(self.down.device), persistent=False)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def get_base_layer(self) -> nn.Linear:
        return self.base

    def forward(self, x: Tensor) -> Tensor:
        ids = self.selection.ids
        if ids is None:
            return self.base(x)
        inner = F.linear(x, self.down).where(self.mask[ids], 0.0)  # not a product: another's may be infinite
        return adapted_linear(self.base, x, inner, self.up)


Factors = dict[str, tuple[Tensor, Tensor]]  # name of a module -> A and B, scaled


def attach_adapters(model: Any, folders: Mapping[str, str]) -> AdapterSelection:
    """Put the adapters of these folders, by name, beside the weights of a transformers model."""
    loaded = {name: _read_factors(model, name, folder) for name, folder in folders.items()}
    selection = AdapterSelection(tuple(folders))
    modules = dict(model.named_modules())
    for path in sorted({path for adapter in loaded.values() for path in adapter}):
        factors = {
            selection.numbers[name]: adapter[path] for name, adapter in loaded.items() if path in adapter
        }
        parent, _, leaf = path.rpartition(".")
        setattr(modules[parent], leaf, AdapterLinear(modules[path], factors, selection))
    return selection


def selection_of(model: nn.Module) -> AdapterSelection | None:
    """The adapters of a model; None where there are none."""
    return next((m.selection for m in model.modules() if isinstance(m, AdapterLinear)), None)


def _read_factors(model: Any, name: str, folder: str) -> Factors:
    wrapped = read_adapter(model, folder, is_trainable=False)
    factors: Factors = {}
    try:
        for path, layer in wrapped.get_base_model().named_modules():
            if hasattr(layer, "lora_A") and not is_plain_lora(layer):
                raise UserError(
                    f"The adapter {name} ({folder}) is more than LoRA of linear layers at {path}: serve it "
                    "alone, or merged (`whet export`)."
                )
            if is_plain_lora(layer):
                down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
                to = {"device": down.device, "dtype": model.dtype}
                scaled = up.detach().float() * layer.scaling["default"]
                factors[path] = (down.detach().to(**to), scaled.to(**to))
                if not all(factor.isfinite().all() for factor in factors[path]):
                    raise UserError(
                        f"The adapter {name} ({folder}) has NaN or infinite weights: leave it out."
                    )
    finally:
        wrapped.unload()
    return factors
