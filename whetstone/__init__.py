"""Whetstone: reinforcement learning for language models on problems whose answers can be verified.

The Python API is `train`, `evaluate`, `load_config` and `Run` (api.py, docs/python.md).
It is imported when it is first used, so that `import whetstone` is cheap.
"""

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["Run", "evaluate", "load_config", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'whetstone' has no attribute '{name}'")
    api = importlib.import_module("whetstone.api")
    # The submodule whetstone.train has the name of the function: api.py makes it callable.
    return importlib.import_module("whetstone.train") if name == "train" else getattr(api, name)
