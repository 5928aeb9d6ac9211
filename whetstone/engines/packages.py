"""Which packages a configuration needs, whether they are installed, and which versions are supported.

Nothing is imported: `whet train` names a missing package before it imports torch.
"""

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from whetstone.config import Config
from whetstone.config.engine_traits import ENGINE_TRAITS, engine_traits
from whetstone.config.plugins import check_object, is_plugin
from whetstone.errors import UserError


class NeededPackage(NamedTuple):
    """A package that a setting needs."""

    package: str
    reason: str  # the setting
    install: str  # the command
    instead: str  # what to set otherwise


def check_packages(config: Config) -> None:
    """Raise, with the commands that install them, if packages or the file of an engine are missing."""
    if is_plugin(config.rollout.rollout_engine):
        check_object(config.rollout.rollout_engine, "rollout_engine")
    missing = [
        f"{need.reason} needs the package {need.package}, which is not installed: run `{need.install}`, "
        f"or set {need.instead}."
        for need in needed_packages(config)
        if not is_installed(need.package)
    ]
    if missing:
        raise UserError(" ".join(missing))


def needed_packages(config: Config) -> Iterator[NeededPackage]:
    """The optional packages that the settings of a run need."""
    if not config.evaluation.eval_only:
        for name in config.run.report_to:
            yield NeededPackage(name, f"report_to: {name}", f"pip install {name}", "report_to=none")
    engine = config.rollout.rollout_engine
    traits = engine_traits(engine)
    in_process = traits.can_colocate and config.rollout.vllm_mode == "colocate"
    elsewhere = config.engines.addresses or (config.engines.server_python and not in_process)
    if traits.has_servers and not elsewhere:
        instead = "rollout_engine=native, rollout_servers to a server that runs, or server_python"
        yield NeededPackage(traits.package, f"rollout_engine: {engine}", traits.install or "", instead)
    if config.programs.sandbox_pool == "ray":
        yield NeededPackage("ray", "sandbox_pool: ray", "pip install ray", "sandbox_pool=local")


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def supported_versions(package: str) -> str:
    """The supported versions of a package, as pip writes them; empty: any, as far as is known."""
    of_engine = next((traits.versions for traits in ENGINE_TRAITS.values() if traits.package == package), "")
    return of_engine or _required_versions().get(_normalized(package), "")


def is_supported(package: str, version: str) -> bool:
    """Whether a version lies within the supported ones. A build such as 2.13.0+cu128 is 2.13.0."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(supported_versions(package)).contains(version, prereleases=True)


@cache
def _required_versions() -> dict[str, str]:
    """Package -> versions, from whetstone's own requirements; none in a tree that is not installed."""
    from packaging.requirements import Requirement

    try:
        lines = importlib.metadata.requires("whetstone") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    requirements = [Requirement(line) for line in lines]
    # As pip writes them: the lower bound first.
    return {
        _normalized(entry.name): ",".join(sorted(map(str, entry.specifier), reverse=True))
        for entry in requirements
    }


def _normalized(package: str) -> str:
    return package.lower().replace("_", "-")
