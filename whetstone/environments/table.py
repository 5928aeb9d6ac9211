"""Names of environments in a configuration -> classes."""

from collections.abc import Callable, Mapping
from typing import Any

from whetstone.config.plugins import is_plugin, load_object
from whetstone.environments.agents import agent_factory
from whetstone.environments.games import GAMES
from whetstone.environments.repair import Repair
from whetstone.environments.toolbox import TOOLBOX, Toolbox

REPAIR = "repair"
_OWN: Mapping[str, Callable[..., Any]] = {**GAMES, REPAIR: Repair, TOOLBOX: Toolbox}


def factory_of(spec: str) -> Callable[..., Any]:
    """The class that a configuration names: one of ours, or my_env.py:MyEnv."""
    if (agent := agent_factory(spec)) is not None:
        return agent
    return load_object(spec, "datasets") if is_plugin(spec) else _OWN[spec]
