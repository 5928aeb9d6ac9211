"""Isolates the current process. Scoring workers call this before they score text that a model wrote.

With namespaces it continues as a new process that sees the interpreter's folders read-only and nothing else.
With filters it stays in place, behind Landlock and seccomp. No network, writing, other process, capabilities.
"""

import importlib.util
import os
import resource
import signal
import sys
import sysconfig
from collections.abc import Iterable

from whetstone.sandbox import namespaces, restrict, seccomp, syscalls
from whetstone.sandbox.layers import DEVICES, layer_names, make_restrictions, other_user

_PROCESSES = 4  # this one, its forks


def isolate(kind: str, packages: Iterable[str], *, memory_mb: int, user_number: int) -> tuple[str, ...]:
    """Enter the layers of `kind` and name them; `packages` stay importable. `OSError` where not allowed."""
    if kind == "limits":
        _limit(memory_mb)
        return ("rlimits",)
    if not seccomp.is_supported():
        raise OSError(38, "this machine does not support seccomp")
    visible, landlock = visible_folders(packages), syscalls.landlock_version()
    has_namespaces = kind == "namespaces"
    if has_namespaces:
        # Our own package, where it is installed among the others, holds answers.
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        hidden = [package] if any(package.startswith(folder + os.sep) for folder in visible) else []
        user = namespaces.enter(visible, hidden, 1, user_number, None).user
    else:
        user = other_user(visible, landlock, user_number)
    readable = (*visible, "/proc", "/etc") if has_namespaces else visible
    restrictions = make_restrictions(user, landlock, True, readable, DEVICES, has_namespaces=has_namespaces)
    _limit(memory_mb, _PROCESSES + restrictions.other_processes)
    if user is None:
        syscalls.drop_capabilities()
    else:
        restrict.drop_groups(user)
        os.setresuid(user, user, user)
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user has cleared it
    restrict.apply_irrevocable(restrictions)
    return (*(("namespaces",) if has_namespaces else ()), *layer_names(restrictions))


def visible_folders(packages: Iterable[str]) -> tuple[str, ...]:
    """The folders of the interpreter's own library and of the packages that are named."""
    paths = sysconfig.get_paths()
    folders = [sys.base_prefix, os.path.realpath(sys.base_prefix), paths["purelib"], paths["platlib"]]
    for name in packages:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin:
            folders.append(os.path.dirname(os.path.dirname(spec.origin)))
    return tuple(dict.fromkeys(folders))


def _limit(memory_mb: int, processes: int | None = None) -> None:
    rlimits = {resource.RLIMIT_CORE: (0, 0), resource.RLIMIT_FSIZE: (0, 0)}
    rlimits[resource.RLIMIT_NOFILE] = (256, 256)
    if sys.platform == "linux":  # macOS does not know this limit
        rlimits[resource.RLIMIT_AS] = (memory_mb << 20, memory_mb << 20)
    if processes is not None:
        rlimits[resource.RLIMIT_NPROC] = (processes, processes)
    restrict.set_limits(rlimits)
