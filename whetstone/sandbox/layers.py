"""Enters the sandbox at the requested isolation level and describes it as a `SandboxEnv`.

`namespaces`: new namespaces and a new root. `filters` and `limits`: a folder, with the restrictions of
`restrict.py`. Raises `OSError` where the machine does not allow the level; the pool then tries the next one.
"""

import contextlib
import os
import resource
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from whetstone.sandbox import namespaces, restrict, seccomp, syscalls
from whetstone.sandbox.restrict import Restrictions

DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


@dataclass(frozen=True, kw_only=True)
class SandboxEnv:
    """The working directories and the restrictions of a supervisor's programs."""

    parent: str  # the folder in which `work_dir` is created for every run
    work_dir: str
    build_dir: str
    restrictions: Restrictions
    layers: tuple[str, ...]
    has_proc: bool
    spawn_helper: str | None  # the program that commands are started by; None: fork for them


def enter_sandbox(settings: dict[str, Any], outside: Callable[[int], NoReturn]) -> SandboxEnv:
    """Enter `settings["kind"]` and return in a new process; the present one ends in `outside(child)`."""
    landlock = 0 if "landlock" in settings["without"] else syscalls.landlock_version()
    has_namespaces = settings["kind"] == "namespaces"
    if has_namespaces:
        env = _enter_namespaces(settings, landlock, outside)
    else:
        env = _enter_folder(settings, landlock, outside)
    restrict.set_limits({resource.RLIMIT_CORE: (0, 0), resource.RLIMIT_NOFILE: (256, 256)})  # for all to come
    if has_namespaces:
        if env.restrictions.user is not None:
            restrict.drop_groups(env.restrictions.user)
        # Children inherit these restrictions, so that none of them has to apply its own.
        restrict.apply_irrevocable(env.restrictions)
    return env


def _enter_namespaces(
    settings: dict[str, Any], landlock: int, outside: Callable[[int], NoReturn]
) -> SandboxEnv:
    helper = _content(settings["spawn_helper"])
    visible, hidden, disk_mb = settings["visible"], settings["hidden"], settings["disk_mb"]
    info = namespaces.enter(visible, hidden, disk_mb, settings["outside_user"], helper, outside)
    spaces = "process, mount, network, ipc, host name" + (", user" if info.has_user_namespace else "")
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)  # a program of the same user can't look into us
    restrictions = make_restrictions(
        info.user,
        landlock,
        seccomp.is_supported(),
        (*visible, namespaces.BUILD_DIR, "/proc", "/etc", namespaces.SPAWN_HELPER),
        (namespaces.WORK_PARENT, *DEVICES, "/dev/full"),
        has_namespaces=True,
    )
    return SandboxEnv(
        parent=namespaces.WORK_PARENT,
        work_dir=namespaces.WORK_DIR,
        build_dir=namespaces.BUILD_DIR,
        restrictions=restrictions,
        layers=(f"namespaces ({spaces})", "read-only root", *layer_names(restrictions)),
        has_proc=info.has_proc,
        spawn_helper=namespaces.SPAWN_HELPER if helper is not None else None,
    )


def _enter_folder(settings: dict[str, Any], landlock: int, outside: Callable[[int], NoReturn]) -> SandboxEnv:
    """Without namespaces: a fork that works in a folder, `filters` or `limits`."""
    parent, build_dir = os.path.join(settings["folder"], "box"), os.path.join(settings["folder"], "built")
    has_seccomp = seccomp.is_supported()
    if child := os.fork():
        outside(child)
    user = other_user(settings["visible"], landlock, settings["outside_user"])
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)  # what a program leaves behind becomes ours
    if settings["kind"] == "filters" and not has_seccomp:
        raise OSError(38, "this machine does not support seccomp")
    if settings["kind"] == "limits":
        landlock, has_seccomp = 0, False
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)  # a program of the same user can't look into us
    restrictions = make_restrictions(
        user,
        landlock,
        has_seccomp,
        (*settings["visible"], build_dir),
        (parent, *DEVICES, "/dev/full"),
        has_namespaces=False,
    )
    return SandboxEnv(
        parent=parent,
        work_dir=os.path.join(parent, "home"),
        build_dir=build_dir,
        restrictions=restrictions,
        layers=layer_names(restrictions),
        has_proc=True,
        spawn_helper=None,
    )


def make_restrictions(
    user: int | None,
    landlock: int,
    has_seccomp: bool,
    readable: Sequence[str],
    writable: Sequence[str],
    *,
    has_namespaces: bool,
) -> Restrictions:
    return Restrictions(
        user=user,
        has_pid_namespace=has_namespaces,
        landlock=landlock,
        seccomp=has_seccomp,
        readable=(*namespaces.SYSTEM, *namespaces.SYSTEM_FILES, *readable),
        writable=tuple(writable),
        other_processes=0 if has_namespaces or user is not None else threads_of_user(),
        supervisor_address_space=_address_space(),
    )


def layer_names(restrictions: Restrictions) -> tuple[str, ...]:
    names = [f"Landlock {restrictions.landlock}"] if restrictions.landlock else []
    names += ["seccomp"] if restrictions.seccomp else []
    names += ["a user of its own"] if restrictions.user is not None else []
    return (*names, "rlimits")


def _content(descriptor: int | None) -> bytes | None:
    """What a file holds that the pool has handed to us (and to others: its position is left alone)."""
    if descriptor is None:
        return None
    content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    os.close(descriptor)
    return content


def other_user(visible: Sequence[str], landlock: int, user_number: int) -> int | None:
    """The user that programs become without a namespace: root's choice, one who can reach the interpreter."""
    if os.geteuid() != 0:
        return None
    for path in visible:
        while path != "/":
            if os.path.exists(path) and not os.stat(path).st_mode & stat.S_IXOTH:
                if not landlock:
                    raise OSError(13, f"{path} is closed to other users: programs would have to run as root")
                return None
            path = os.path.dirname(path)
    return user_number


def _address_space() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # no /proc in here
        return 256 << 20


def threads_of_user() -> int:
    """RLIMIT_NPROC counts all threads of a user on the machine."""
    count = 0
    for entry in os.scandir("/proc") if os.path.isdir("/proc/self") else ():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{entry.name}/task"))
    return count
