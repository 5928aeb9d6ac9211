"""Memory of the host as far as this process may use it: physical memory and the limits of control groups.

Reads /proc and /sys on Linux. Where a file is missing, the number is None or that of the whole machine.
"""

import contextlib
import os
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60  # version 1 writes a number near 2^63 for no limit


def total_memory() -> int:
    """Bytes of physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_limit() -> int:
    """Bytes that this process and its children may use together: the machine's, or a control group's."""
    return min([total_memory(), *(limit for limit, _ in _group_limits())])


def available_memory() -> int | None:
    """Bytes that can still be allocated before the machine or a control group runs out; None: not known."""
    free = next((n << 10 for key, n in _numbers(PROC / "meminfo") if key == "MemAvailable:"), None)
    rest = [max(0, limit - used) for limit, used in _group_limits()]
    return min([*rest, *([] if free is None else [free])], default=None)


def tree_memory(root: int | None = None) -> int | None:
    """Resident bytes of a process (default: this one) and its descendants; None: not known.

    Of a descendant only its own pages count: those that it shares with others are counted once.
    """
    total, pending = 0, [root or os.getpid()]
    first = pending[0]
    while pending:
        process = pending.pop()
        try:
            _, resident, shared, *_ = map(int, (PROC / str(process) / "statm").read_text().split())
            pending += _children(process)
        except (OSError, ValueError):  # it ended meanwhile, or there is no /proc
            if process == first:
                return None
            continue
        total += resident if process == first else max(0, resident - shared)
    return total * os.sysconf("SC_PAGE_SIZE")


def _children(process: int) -> list[int]:
    """A child belongs to the thread that started it. Plain calls: there may be thousands of threads."""
    children = []
    folder = f"{PROC}/{process}/task"
    for thread in os.listdir(folder):
        with contextlib.suppress(OSError), open(f"{folder}/{thread}/children", "rb") as file:
            children += [int(child) for child in file.read().split()]
    return children


def _numbers(path: Path) -> list[tuple[str, int]]:
    """The lines `name number` of a file; none where it can't be read."""
    try:
        fields = [line.split() for line in path.read_text(encoding="ascii", errors="replace").splitlines()]
    except OSError:
        return []
    return [(line[0], int(line[1])) for line in fields if len(line) > 1 and line[1].isdigit()]


def _group_limits() -> list[tuple[int, int]]:
    """(limit, use without reclaimable cache) in bytes of each control group that limits this process."""
    limits = []
    for folder, limit_file, use_file in _group_folders():
        limit, use = _number(folder / limit_file), _number(folder / use_file)
        if limit is None or limit >= UNLIMITED:
            continue
        cache = dict(_numbers(folder / "memory.stat"))
        reclaimable = cache.get("total_inactive_file", cache.get("inactive_file", 0))
        limits.append((limit, max(0, (use or 0) - reclaimable)))
    return limits


def _group_folders() -> list[tuple[Path, str, str]]:
    """(folder, name of the limit, name of the use) of this process's groups and of those above them."""
    try:
        lines = (PROC / "self" / "cgroup").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        root = CGROUPS / "memory" if controllers else CGROUPS
        names = ("memory.max", "memory.current")
        if controllers:  # version 1
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        own = root / path.strip("/")
        above = [parent for parent in own.parents if parent == root or root in parent.parents]
        folders += [(folder, *names) for folder in dict.fromkeys((own, *above, root))]
    return folders


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
