"""Optional packages that a configuration needs: a missing one is named before any model is loaded.

Looks for them without importing them. What they are for is the adapters' business.
"""

import importlib.util
from collections.abc import Iterator

from whetstone.config import Config
from whetstone.engines.servers.vllm import INSTALL
from whetstone.errors import UserError


def check_packages(config: Config) -> None:
    """Refuse, with the command that installs it, what the run would miss later."""
    for package, reason, install, instead in _needed(config):
        if not _is_installed(package):
            raise UserError(
                f"{reason} needs the package {package}, which is not installed: run `{install}`, or set "
                f"{instead}."
            )


def _needed(config: Config) -> Iterator[tuple[str, str, str, str]]:
    """(package, which setting needs it, how to install it, what to set instead)."""
    if not config.evaluation.eval_only:
        for name in config.run.report_to:
            yield name, f"report_to: {name}", f"pip install {name}", "report_to=none"
        if config.run.trainer == "trl":
            yield "trl", "trainer: trl", "pip install 'whetstone[trl]'", "trainer=whetstone"
    engine = config.rollout.rollout_engine
    own_server = engine in ("vllm", "sglang") and not config.engines.addresses
    if own_server and engine == "vllm":
        # A server that runs already, on this machine or another, needs no package here.
        instead = "rollout_engine=native (use_vllm=false), or rollout_servers to a server that runs"
        yield "vllm", "rollout_engine: vllm", INSTALL, instead
    if own_server and engine == "sglang":
        instead = "rollout_engine=native, or rollout_servers to a server that runs"
        yield "sglang", "rollout_engine: sglang", "pip install sglang", instead
    if config.programs.sandbox_pool == "ray":
        yield "ray", "sandbox_pool: ray", "pip install ray", "sandbox_pool=local"


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
