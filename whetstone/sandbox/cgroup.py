"""A control group for a supervisor: hard limits on the memory and the number of all its processes together.

Version 2 where its controllers are delegated to us, else version 1. Where neither is writable (a user without
delegation, most containers) there is none; rlimits and the supervisor's memory monitor remain.
"""

import contextlib
import os
import re
import time
from collections.abc import Container
from pathlib import Path

_ROOT = "/sys/fs/cgroup"


def join(process: int, memory_mb: int, processes: int) -> tuple[str, ...] | None:
    """Put a process into new groups; their folders, or None where that is not allowed."""
    folders: list[str] = []
    try:
        for controller, files in (
            ("memory", {"memory.max": memory_mb << 20, "memory.limit_in_bytes": memory_mb << 20}),
            ("pids", {"pids.max": processes}),
        ):
            folder = _folder(controller, process)
            if folder not in folders:
                os.mkdir(folder)
                folders.append(folder)
            present = [name for name in files if os.path.exists(f"{folder}/{name}")]
            if not present:
                raise OSError(38, f"no {controller} controller")
            for name in present:
                Path(folder, name).write_text(str(files[name]))
        for folder in folders:
            Path(folder, "cgroup.procs").write_text(str(process))
    except OSError:
        leave(tuple(folders))
        return None
    return tuple(folders)


def leave(folders: tuple[str, ...]) -> None:
    """Remove the groups; the processes are gone, but the kernel may need a moment to notice."""
    for folder in folders:
        for _ in range(50):
            try:
                os.rmdir(folder)
                break
            except FileNotFoundError:
                break
            except OSError:
                time.sleep(0.01)


def remove_of(owners: Container[int]) -> None:
    """Remove groups that processes which were killed have left behind."""
    for parent in {os.path.dirname(_folder(controller, 0)) for controller in ("memory", "pids")}:
        with contextlib.suppress(OSError):
            for name in os.listdir(parent):
                match = re.fullmatch(r"whet-(\d+)-\d+", name)
                if match and int(match[1]) in owners:
                    with contextlib.suppress(OSError):  # not empty yet
                        os.rmdir(os.path.join(parent, name))


def _folder(controller: str, process: int) -> str:
    name = f"whet-{os.getpid()}-{process}"
    own_path = ""
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="ascii") as file:
        for line in file:
            _, controllers, path = line.strip().split(":", 2)
            if controller in controllers.split(","):  # version 1
                return f"{_ROOT}/{controller}{path.rstrip('/')}/{name}"
            if not controllers:
                own_path = path.rstrip("/")
    return f"{_ROOT}{own_path}/{name}"
