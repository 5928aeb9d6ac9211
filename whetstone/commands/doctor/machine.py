"""Python, processors, memory; the folders that a run writes, and their disks; the sandbox and languages."""

import os
import platform
import shutil
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

from whetstone.commands.doctor.check import Check, make_check
from whetstone.config import Config
from whetstone.config.engine_traits import engine_traits
from whetstone.errors import UserError
from whetstone.model.hub import cache_folder
from whetstone.run import host
from whetstone.sandbox.languages import LANGUAGES, language, missing, tools
from whetstone.sandbox.pool import LocalPool
from whetstone.sandbox.worker_process import available_cores

SANDBOX, PROGRAMS = "Sandbox for programs and scorers", "Languages of programs"
MACHINE, FOLDERS = "Machine", "Folders and disks"
SHARED_MEMORY = Path("/dev/shm")
GB = 2**30
MIN_MEMORY = 2 * GB
MIN_SHARED = GB  # Docker's default is 64 MB
MIN_DISK, LEAST_DISK = 2 * GB, GB // 8  # below: a warning, a problem


def check_machine(config: Config | None) -> list[Check]:
    return [
        _python(),
        make_check(MACHINE, "CPU", f"{available_cores()} cores"),
        _memory(),
        *_shared_memory(config),
    ]


def check_folders(config: Config | None) -> list[Check]:
    """Write access and free space, by writing a file that has no name."""
    output = Path("outputs") if config is None else Path(config.run.output_dir) / (config.run.run_name or "")
    return [
        _folder("output_dir", output, "set output_dir to another folder", is_needed=True),
        _folder("model cache", hub_cache(), "set HF_HOME to another folder"),
        _folder("own cache", cache_folder(), "set WHETSTONE_CACHE to another folder"),
        _folder("temporary", _temporary_folder(), "set TMPDIR to another folder", is_needed=True),
    ]


def _python() -> Check:
    from packaging.specifiers import SpecifierSet

    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {sys.prefix}"
    try:
        supported = metadata("whetstone")["Requires-Python"] or ""
    except PackageNotFoundError:  # a source tree that is not installed
        supported = ""
    if SpecifierSet(supported).contains(platform.python_version(), prereleases=True):
        return make_check(MACHINE, "Python", detail)
    remedy = f"install whetstone under a Python {supported} (make PYTHON=python3.12 train)"
    return make_check(MACHINE, "Python", detail, remedy, problem=True)


def _memory() -> Check:
    limit, total, free = host.memory_limit(), host.total_memory(), host.available_memory()
    detail = f"{limit / GB:.1f} GB"
    if limit < total:
        detail += f" (limit of the control group; the machine has {total / GB:.1f} GB)"
    if free is None:
        return make_check(MACHINE, "memory", detail)
    detail += f", {free / GB:.1f} GB available"
    remedy = "end other processes, or raise the limit of the container (docker run --memory)"
    return make_check(MACHINE, "memory", detail, remedy if free < MIN_MEMORY else "")


def _shared_memory(config: Config | None) -> list[Check]:
    """Ranks (NCCL) and servers exchange data there; a single process does not."""
    traits = engine_traits(config.rollout.rollout_engine) if config else None
    starts_servers = config and traits and traits.has_servers and not config.engines.addresses
    if not SHARED_MEMORY.is_dir() or (config and num_ranks(config) == 1 and not starts_servers):
        return []
    size = shutil.disk_usage(SHARED_MEMORY)
    detail = f"{SHARED_MEMORY} has {size.total / GB:.1f} GB, {size.free / GB:.1f} GB free"
    remedy = "start the container with --shm-size=8g" if size.free < MIN_SHARED else ""
    return [make_check(MACHINE, "shared memory", detail, remedy, problem=config is not None)]


def num_ranks(config: Config) -> int:
    """The ranks of this launch, or as many as the configuration needs at least."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    return launched if launched > 1 else config.parallel.tp_size * config.parallel.ddp_size


def hub_cache() -> Path:
    """Where transformers keeps models of the hub."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    home = Path(os.environ.get("HF_HOME") or home)
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()


def _temporary_folder() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except OSError:  # none can be written
        return Path(os.environ.get("TMPDIR") or "/tmp")


def _folder(name: str, path: Path, otherwise: str, *, is_needed: bool = False) -> Check:
    """A folder that may not exist yet: the nearest one above it counts."""
    here = next((folder for folder in (path, *path.absolute().parents) if folder.exists()), Path("/"))
    try:
        with tempfile.TemporaryFile(dir=here) as file:
            file.write(b"x" * 4096)
            file.flush()
        free = shutil.disk_usage(here).free
    except OSError as error:
        detail = f"{path} may not be written ({error.strerror})"
        return make_check(FOLDERS, name, detail, otherwise, problem=is_needed)
    detail = f"{path}: writable, {free / GB:.1f} GB free"
    remedy = "" if free >= MIN_DISK else f"free some space, or {otherwise}"
    return make_check(FOLDERS, name, detail, remedy, problem=is_needed and free < LEAST_DISK)


def check_sandbox(config: Config | None) -> list[Check]:
    isolation = "auto" if config is None else config.programs.sandbox_isolation
    try:
        with LocalPool(isolation=isolation) as pool:
            pool.start("python")
            kind, statement = str(pool.kind), pool.statement
    except UserError as error:
        remedy = "allow user namespaces or seccomp, or accept the risk with sandbox_isolation=limits"
        detail = str(error).partition(": allow")[0]
        return [make_check(SANDBOX, "isolation", detail, remedy, problem=True)]
    remedy = "" if kind == "namespaces" or isolation == kind else "allow user namespaces (docs/sandbox.md)"
    return [make_check(SANDBOX, "isolation", f"{kind}: {statement}", remedy)]


def check_languages(config: Config | None) -> list[Check]:
    """Every language, or those that the code tasks of a run name."""
    needed = list(LANGUAGES) if config is None else _languages(config)
    return [_language(name, is_needed=config is not None) for name in needed]


def _languages(config: Config) -> list[str]:
    specs = {**config.tasks.datasets, **config.tasks.eval_datasets}.values()
    named = [spec.config["language"] for spec in specs if spec.config.get("language")]
    return list(dict.fromkeys(language(str(name)).name for name in named))


def _language(name: str, *, is_needed: bool) -> Check:
    row = LANGUAGES[name]
    if missing(name) is not None:
        return make_check(PROGRAMS, name, "not installed", row.install_hint, problem=is_needed)
    detail = row.title
    if row.runner == "exec":
        here = tools(name)
        commands = here.compilers or (here.command,)
        detail += ": " + ", then ".join(command[0] for command in commands)
    return make_check(PROGRAMS, name, detail)
