"""Check, without importing them, that the optional packages of a configuration are installed."""

import importlib.util
from collections.abc import Iterator

from whetstone.config import Config
from whetstone.config.engine_traits import engine_traits
from whetstone.config.plugins import check_object, is_plugin
from whetstone.errors import UserError


def check_packages(config: Config) -> None:
    """Raise, with the command that installs it, if a package or the file of an engine is missing."""
    if is_plugin(config.rollout.rollout_engine):
        check_object(config.rollout.rollout_engine, "rollout_engine")
    for package, reason, install, instead in _needed(config):
        if not _is_installed(package):
            missing = f"{reason} needs the package {package}, which is not installed"
            raise UserError(f"{missing}: run `{install}`, or set {instead}.")


def _needed(config: Config) -> Iterator[tuple[str, str, str, str]]:
    """(package, which setting needs it, how to install it, what to set instead)."""
    if not config.evaluation.eval_only:
        for name in config.run.report_to:
            yield name, f"report_to: {name}", f"pip install {name}", "report_to=none"
        if config.run.trainer == "trl":
            yield "trl", "trainer: trl", "pip install 'whetstone[trl]'", "trainer=whetstone"
    engine = config.rollout.rollout_engine
    traits = engine_traits(engine)
    if traits.has_servers and not config.engines.addresses:
        # A server that runs already, on this machine or another, needs no package here.
        instead = "rollout_engine=native, or rollout_servers to a server that runs"
        yield traits.package, f"rollout_engine: {engine}", traits.install or "", instead
    if config.programs.sandbox_pool == "ray":
        yield "ray", "sandbox_pool: ray", "pip install ray", "sandbox_pool=local"


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
