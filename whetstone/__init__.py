"""Whetstone: reinforcement learning for language models on problems whose answers can be verified.

The Python API is `train`, `steps`, `evaluate`, `sample`, `load_config` and `Run` (api.py, docs/python.md).
It is imported when it is first used, so that `import whetstone` is cheap.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"
__all__ = ["Run", "evaluate", "load_config", "sample", "steps", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'whetstone' has no attribute '{name}'")
    return getattr(importlib.import_module("whetstone.api"), name)


class _CallableModule(ModuleType):
    """`whetstone.train` is the module of the training loop and the function of the API: it can be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return importlib.import_module("whetstone.api").train(*args, **kwargs)


class _Package(ModuleType):
    @property
    def train(self) -> ModuleType:
        return importlib.import_module("whetstone.train")

    @train.setter
    def train(self, module: ModuleType) -> None:
        """Called by the import system after it has imported the submodule."""
        module.__class__ = _CallableModule


sys.modules[__name__].__class__ = _Package
