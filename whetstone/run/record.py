"""run.json: version, commit, machine and command of each session; also reads small files of a run folder."""

import contextlib
import copy
import functools
import importlib.metadata
import json
import logging
import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from whetstone import __version__
from whetstone.errors import UserError
from whetstone.files import atomic_write
from whetstone.sandbox.worker_process import available_cores
from whetstone.terminal.log import STEP_LINES

NAME = "run.json"


def record_session(folder: Path, *, resumed_from: int | None = None, num_ranks: int = 1) -> dict[str, Any]:
    """Write this session into run.json and, in one line, into the log; returns its entry."""
    program = Path(sys.argv[0]).name.replace("__main__.py", "whet")  # `python -m whetstone` is the same
    session = {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join([program, *sys.argv[1:]]),
        "whetstone": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "machine": machine(),
        "num_ranks": num_ranks,
        "resumed_from_step": resumed_from,
    }
    earlier = [] if resumed_from is None else read_sessions(folder)
    atomic_write(folder / NAME, json.dumps({"sessions": [*earlier, session]}, indent=1) + "\n")
    logging.getLogger(STEP_LINES).info("%s", headline(session))
    return session


def read_sessions(folder: Path) -> list[dict[str, Any]]:
    """The sessions of a run, the first one first; none where the file is missing or broken."""
    sessions = (read_mapping(folder / NAME) or {}).get("sessions")
    return [entry for entry in sessions if isinstance(entry, dict)] if isinstance(sessions, list) else []


def began_at(folder: Path | None) -> str | None:
    """When a run began, which its chat template takes for today after a resume as well; None: unknown."""
    sessions = [] if folder is None else read_sessions(folder)
    with contextlib.suppress(IndexError, KeyError, TypeError, ValueError):
        return datetime.fromisoformat(sessions[0]["started"]).isoformat()


def read_mapping(path: Path) -> dict[str, Any] | None:
    """The mapping in a JSON or YAML file of a run; None where it is missing or broken."""
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else copy.deepcopy(_parse_yaml(text))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    return data if isinstance(data, dict) else None


@functools.lru_cache(maxsize=8)
def _parse_yaml(text: str) -> Any:
    """The end of a run reads its configuration five times; parsing it takes 50 ms."""
    return yaml.safe_load(text)


def check_run_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"There is no run folder {folder}: give the folder of a run (outputs/quickstart).")


def headline(session: dict[str, Any]) -> str:
    """A session in one line."""
    its = session["machine"]
    program = f"whetstone {session['whetstone']}"
    program += f" (commit {session['commit']})" if session["commit"] else ""
    devices = ", ".join([f"{its['cpu']}, {its['cores']} cores, {its['memory_gb']} GB", *its["gpus"]])
    return (
        f"{program}, Python {session['python']}, torch {session['torch']}, transformers "
        f"{session['transformers']}; {its['system']}, {devices}; command: {session['command']}"
    )


def machine() -> dict[str, Any]:
    """Processor, cores that we may use, memory in GB (2^30), GPUs."""
    import torch

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    cores = available_cores()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": next(names, platform.processor() or platform.machine()),
        "cores": cores,
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
    }


def commit() -> str | None:
    """The commit of a source tree, with `-dirty` where it was changed; None for an installed package.

    A tree that does not track this file is somebody else's: the project that holds our environment.
    """
    here = Path(__file__).resolve()
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    return _git(here.parent, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _git(folder: Path, *args: str) -> str | None:
    try:
        command = ["git", "-C", str(folder), *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, no repository, or not ours to read
        return None
    return done.stdout.strip()


def version(package: str) -> str | None:
    """The version of an installed package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
