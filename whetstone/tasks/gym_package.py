"""What is used of reasoning-gym: imported here alone, and without matplotlib.

Of the time that reasoning-gym takes to import, 40 % is matplotlib's, which cellpylib imports for plots that
no task draws. cellpylib makes the boards of game_of_life, and is loaded when the first one is made.
"""

import importlib
import sys
from types import ModuleType
from typing import Any


class _LateModule(ModuleType):
    """Stands for a module until one of its attributes is read."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of the import system: no reason to load it
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


_LATE = "cellpylib"
_is_loaded = _LATE in sys.modules
if not _is_loaded:
    sys.modules[_LATE] = _LateModule(_LATE)
try:
    from reasoning_gym.coaching.attributes import RangeAttributeDefinition
    from reasoning_gym.dataset import ProceduralDataset
    from reasoning_gym.factory import CURRICULA, DATASETS, create_curriculum, create_dataset
    from reasoning_gym.logic.knights_knaves import VALID_ROLES
    from reasoning_gym.utils import SYSTEM_PROMPTS
finally:
    if not _is_loaded:
        del sys.modules[_LATE]

__all__ = [
    "CURRICULA",
    "DATASETS",
    "SYSTEM_PROMPTS",
    "VALID_ROLES",
    "ProceduralDataset",
    "RangeAttributeDefinition",
    "create_curriculum",
    "create_dataset",
]
