"""Whetstone: reinforcement learning for language models on problems whose answers can be verified.

The Python API is `__all__` (api.py, docs/python.md). It is imported when it is first used, so that
`import whetstone` is cheap.
"""

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["GRPOConfig", "GRPOTrainer", "Run", "evaluate", "load_config", "sample", "steps", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'whetstone' has no attribute '{name}'")
    return getattr(importlib.import_module("whetstone.api"), name)
