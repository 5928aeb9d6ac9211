"""The configuration: typed, bounded, documented keys, YAML and `key=value`, batch arithmetic. No torch."""

from whetstone.config.ineffective import ineffective_settings, without_effect
from whetstone.config.load import LoadedConfig, build, dump, find, flatten, load, recipe_folders
from whetstone.config.plan import Plan, make_plan
from whetstone.config.sections import Config
from whetstone.config.tasks import TaskSpec

__all__ = [
    "Config",
    "LoadedConfig",
    "Plan",
    "TaskSpec",
    "build",
    "dump",
    "find",
    "flatten",
    "ineffective_settings",
    "load",
    "make_plan",
    "recipe_folders",
    "without_effect",
]
