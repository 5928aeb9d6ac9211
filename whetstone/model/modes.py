"""Modes of a model: training or not, with its adapter or without.

torch's and peft's own switches walk all modules. With an adapter on 28 layers they take the host 8 and 20 to
80 ms, twice in every step, while a GPU has nothing to do.
"""

import contextlib
from collections.abc import Iterator

from torch import nn


class Modes:
    def __init__(self, model: nn.Module):
        self._modules = list(model.modules())
        self._adapted = [module for module in self._modules if hasattr(module, "_disable_adapters")]

    def train(self, training: bool = True) -> None:
        """As `model.train(training)`."""
        for module in self._modules:
            vars(module)["training"] = training  # nn.Module looks every attribute over that is set

    @contextlib.contextmanager
    def without_adapter(self) -> Iterator[None]:
        """As peft's `disable_adapter`, for passes without gradients: it leaves `requires_grad` alone."""
        self._disable(True)
        try:
            yield
        finally:
            self._disable(False)

    def _disable(self, disabled: bool) -> None:
        for module in self._adapted:
            vars(module)["_disable_adapters"] = disabled


def disable_dropout(model: nn.Module) -> None:
    """No dropout and no noise of routers, except in adapters: what is trained is what sampled."""
    for name, module in model.named_modules():
        if "lora_" in name:
            continue
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for key, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in key or "jitter" in key):
                setattr(module, key, 0.0)
