"""Packages and their versions: requirements, engines, sinks. Servers that run already; wandb's key."""

import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

from whetstone.commands.doctor.check import Check, make_check
from whetstone.config import Config
from whetstone.config.engine_traits import ENGINE_TRAITS
from whetstone.config.plugins import check_object, is_plugin
from whetstone.config.run import SINKS
from whetstone.engines.packages import is_installed, is_supported, needed_packages, supported_versions
from whetstone.engines.servers.http import HttpClient
from whetstone.errors import UserError
from whetstone.run.record import version

PACKAGES, ENGINES, EXTRAS = "Packages", "Engines (rollout_engine)", "Extras"
REQUIRED = ("torch", "transformers", "peft", "reasoning-gym")
WANDB_URL = "https://api.wandb.ai"


def check_requirements(config: Config | None) -> list[Check]:
    """Packages that come with whetstone."""
    return [_package(PACKAGES, name, is_needed=True) for name in REQUIRED]


def check_engines(config: Config | None) -> list[Check]:
    """Every engine, or that of a run and the servers that it names."""
    if config is None:
        return [_engine(name, is_needed=False) for name in ENGINE_TRAITS]
    engine = config.rollout.rollout_engine
    if is_plugin(engine):
        return [_own_engine(engine)]
    if ENGINE_TRAITS[engine].has_servers and config.engines.addresses:
        return [_server(address) for address in config.engines.addresses]
    return [_engine(engine, is_needed=True)]


def check_extras(config: Config | None) -> list[Check]:
    """Optional packages, or those that the settings of a run need."""
    if config is None:
        names = {"ray": "sandbox_pool: ray"}
        names |= {sink: f"report_to: {sink}" for sink in SINKS}
    else:
        engines = {traits.package for traits in ENGINE_TRAITS.values()}
        names = {need.package: need.reason for need in needed_packages(config) if need.package not in engines}
    checks = []
    for name, reason in names.items():
        checks.append(_package(EXTRAS, name, is_needed=config is not None, reason=f", for {reason}"))
        if name == "wandb" and checks[-1].status != "problem" and is_installed(name):
            checks.append(_wandb_login(is_needed=config is not None))
    if config is not None and config.run.push_to_hub:
        checks.append(_hub_login())
    return checks


def _package(section: str, name: str, *, is_needed: bool, reason: str = "") -> Check:
    """Installed, in a supported version."""
    supported = supported_versions(name)
    install = f"pip install '{name}{supported}'" if supported else f"pip install {name}"
    present = version(name) if is_installed(name.replace("-", "_")) else None
    if present is None:
        return make_check(section, name, f"not installed{reason}", install, problem=is_needed)
    if not is_supported(name, present):
        return make_check(section, name, f"{present}, and {supported} is supported{reason}", install)
    return make_check(section, name, f"{present}{reason}")


def _engine(name: str, *, is_needed: bool) -> Check:
    traits = ENGINE_TRAITS[name]
    check = _package(ENGINES, traits.package, is_needed=is_needed)
    status = check.status
    if status == "warning" and is_needed and not traits.comes_with_whetstone:
        status = "problem"  # the protocol of a server differs between versions
    detail = f"{traits.package} {check.detail}"
    return Check(ENGINES, name, status, detail, check.remedy)


def _own_engine(spec: str) -> Check:
    try:
        check_object(spec, "rollout_engine")
    except UserError as error:
        return make_check(ENGINES, "your own", str(error), "set rollout_engine to an engine", problem=True)
    return make_check(ENGINES, "your own", spec)


def _server(address: str) -> Check:
    if HttpClient(address).is_healthy():
        return make_check(ENGINES, "server", f"{address} answers")
    remedy = "start it (docs/servers.md)"
    return make_check(ENGINES, "server", f"{address} does not answer", remedy, problem=True)


def _hub_login() -> Check:
    """A token of the hub. It is neither printed nor sent; a run trains without it."""
    from huggingface_hub import get_token

    if get_token() is not None:
        return make_check(EXTRAS, "hub login", "a token for push_to_hub")
    return make_check(EXTRAS, "hub login", "no token for push_to_hub", "run `hf auth login`, or set HF_TOKEN")


def _wandb_login(*, is_needed: bool) -> Check:
    """A key in the environment or in netrc. It is neither printed nor sent."""
    mode = os.environ.get("WANDB_MODE", "").lower()
    if mode in ("offline", "disabled", "dryrun"):
        return make_check(EXTRAS, "wandb login", f"not needed: WANDB_MODE is {mode}")
    if os.environ.get("WANDB_API_KEY"):
        return make_check(EXTRAS, "wandb login", "a key in WANDB_API_KEY")
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or WANDB_URL).hostname or ""
    named = os.environ.get("NETRC")
    for file in [Path(named)] if named else [Path("~/.netrc"), Path("~/_netrc")]:
        try:
            entry = netrc.netrc(str(file.expanduser())).authenticators(host)
        except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
            continue
        if entry is not None and entry[2]:
            return make_check(EXTRAS, "wandb login", f"a key for {host} in {file}")
    remedy = "run `wandb login`, or set WANDB_MODE=offline"
    return make_check(EXTRAS, "wandb login", f"no key for {host}", remedy, problem=is_needed)
