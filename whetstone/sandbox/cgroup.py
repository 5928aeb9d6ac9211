"""A control group for a keeper where we may make one: a hard ceiling for the memory and the number of all its
processes together.

Version 2 where its controllers are handed on to us, else version 1; where neither can be written (an ordinary
user without delegation, most containers) there is none, and rlimits with the keeper's own watch must do.
"""

import contextlib
import os
import time

_ROOT = "/sys/fs/cgroup"


def join(process: int, memory_mb: int, processes: int) -> tuple[str, ...] | None:
    """Put a process into new groups; their folders, or None where that is not allowed."""
    made: list[str] = []
    try:
        for controller, files in (
            ("memory", {"memory.max": memory_mb << 20, "memory.limit_in_bytes": memory_mb << 20}),
            ("pids", {"pids.max": processes}),
        ):
            folder = _folder(controller, process)
            if folder not in made:
                os.mkdir(folder)
                made.append(folder)
            written = [name for name in files if os.path.exists(f"{folder}/{name}")]
            if not written:
                raise OSError(38, f"no {controller} controller")
            for name in written:
                _write(f"{folder}/{name}", str(files[name]))
        for folder in made:
            _write(f"{folder}/cgroup.procs", str(process))
    except OSError:
        leave(tuple(made))
        return None
    return tuple(made)


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


def _folder(controller: str, process: int) -> str:
    name = f"whet-{os.getpid()}-{process}"
    own = ""
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="ascii") as file:
        for line in file:
            _, controllers, path = line.strip().split(":", 2)
            if controller in controllers.split(","):  # version 1
                return f"{_ROOT}/{controller}{path.rstrip('/')}/{name}"
            if not controllers:
                own = path.rstrip("/")
    return f"{_ROOT}{own}/{name}"


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)
