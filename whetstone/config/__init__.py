"""Every knob: typed, bounded, documented; YAML and key=value; no torch."""

from whetstone.config.load import Loaded, build, dump, find, flatten, load, recipe_folders
from whetstone.config.plan import Plan, make_plan, without_effect
from whetstone.config.sections import Config, TaskSpec

__all__ = [
    "Config",
    "Loaded",
    "Plan",
    "TaskSpec",
    "build",
    "dump",
    "find",
    "flatten",
    "load",
    "make_plan",
    "recipe_folders",
    "without_effect",
]
