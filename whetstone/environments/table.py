"""Names of environments in a configuration -> classes."""

from collections.abc import Callable, Mapping
from typing import Any

from whetstone.config.plugins import is_plugin, load_object
from whetstone.environments.agents import agent_factory
from whetstone.environments.games import GAMES
from whetstone.environments.openenv import is_address, openenv_factory
from whetstone.environments.packages import is_package_name, package_factory
from whetstone.environments.repair import Repair
from whetstone.environments.toolbox import TOOLBOX, Toolbox

REPAIR = "repair"
_OWN: Mapping[str, Callable[..., Any]] = {**GAMES, REPAIR: Repair, TOOLBOX: Toolbox}


def is_known(spec: str) -> bool:
    """Whether a configuration may name it as an environment; a file is not opened."""
    return is_plugin(spec) or spec in GAMES


def is_named(spec: str) -> bool:
    """Whether it names an environment of another package or of a server, not a file of the user's."""
    return is_package_name(spec) or is_address(spec)


def factory_of(spec: str) -> Callable[..., Any]:
    """What a configuration names: one of ours, my_env.py:MyEnv, one of another package or of a server."""
    if (agent := agent_factory(spec)) is not None:
        return agent
    if is_address(spec):
        return openenv_factory(spec)
    if is_package_name(spec):
        return package_factory(spec)
    return load_object(spec, "datasets") if is_plugin(spec) else _OWN[spec]
