"""Every knob: typed, bounded, documented; YAML and key=value; no torch."""

from whetstone.config.load import Loaded, build, dump, find, flatten, load, nearest, recipe_folders
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
    "nearest",
    "recipe_folders",
    "without_effect",
]
