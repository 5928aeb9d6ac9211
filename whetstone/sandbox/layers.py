"""Where a keeper works and what surrounds its programs: found out once, when it starts.

Goes as far in as it is told (`kind`): into a world of its own (`root.py`), or no further than a folder,
behind the filters of `guard.py`. Raises `OSError` where the machine does not allow it; the pool then tries
the next.
"""

import contextlib
import os
import resource
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from whetstone.sandbox import namespaces, restrict, seccomp, syscalls
from whetstone.sandbox.restrict import Walls


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this keeper works and what surrounds its programs."""

    parent: str  # the folder in which `box` is made anew for every run
    box: str
    built: str
    walls: Walls
    layers: tuple[str, ...]
    has_proc: bool
    starter: str | None  # the program that commands are started by; None: fork for them


def settle(settings: dict[str, Any], outside: Callable[[int], NoReturn]) -> Place:
    """Go as far in as `settings["kind"]` says; returns in a new process. `outside`: what the present one does
    from now on, given its child.
    """
    landlock = 0 if "landlock" in settings["without"] else syscalls.landlock_version()
    has_seccomp = seccomp.is_supported()
    starter = _content(settings["starter"])
    if settings["kind"] == "namespaces":
        world = namespaces.enter(
            settings["visible"],
            settings["hidden"],
            settings["disk_mb"],
            settings["outside_user"],
            starter,
            outside,
        )
        parent, box, built = namespaces.BOX, namespaces.HOME, namespaces.BUILT
        user, has_proc = world.user, world.has_proc
        spaces = "process, mount, network, ipc, host name" + (", user" if world.has_user_namespace else "")
        layers = [f"namespaces ({spaces})", "read-only root"]
    else:
        parent, built = os.path.join(settings["folder"], "box"), os.path.join(settings["folder"], "built")
        box = os.path.join(parent, "home")
        if child := os.fork():
            outside(child)
        user, has_proc = other_user(settings["visible"], landlock, settings["outside_user"]), True
        layers = []
        syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)  # what a program leaves behind becomes ours
        if settings["kind"] == "filters" and not has_seccomp:
            raise OSError(38, "seccomp is not to be had on this machine")
        if settings["kind"] == "limits":
            landlock, has_seccomp = 0, False
    inner = settings["kind"] == "namespaces"
    readable = (*namespaces.SYSTEM, *namespaces.SYSTEM_FILES, *settings["visible"], built)
    readable += ("/proc", "/etc", namespaces.START) if inner else ()
    writable = (parent, "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
    layers += [f"Landlock {landlock}"] if landlock else []
    layers += ["seccomp"] if has_seccomp else []
    layers += ["a user of its own"] if user is not None else []
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)  # a program of the same user can't look into us
    walls = Walls(
        user=user,
        has_own_processes=inner,
        landlock=landlock,
        seccomp=has_seccomp,
        readable=readable,
        writable=writable,
        processes_elsewhere=0 if inner or user is not None else threads_of_user(),
        keeper_is_inside=inner,
        address_space_now=_address_space(),
    )
    restrict.set_limits({resource.RLIMIT_CORE: (0, 0), resource.RLIMIT_NOFILE: (256, 256)})  # for all to come
    if inner:
        if user is not None:
            restrict.give_up_groups(user)
        # Children are born behind these walls, which saves each of them the time to build its own.
        restrict.for_good(walls, writable)
    return Place(
        parent=parent,
        box=box,
        built=built,
        walls=walls,
        layers=(*layers, "rlimits"),
        has_proc=has_proc,
        starter=namespaces.START if inner and starter is not None else None,
    )


def _content(descriptor: int | None) -> bytes | None:
    """What a file holds that the pool has handed to us (and to others: its position is left alone)."""
    if descriptor is None:
        return None
    content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    os.close(descriptor)
    return content


def other_user(visible: Sequence[str], landlock: int, user_number: int) -> int | None:
    """The user that programs become without a namespace: only root can choose, and only one who can still
    reach the interpreter.
    """
    if os.geteuid() != 0:
        return None
    for path in visible:
        while path != "/":
            if os.path.exists(path) and not os.stat(path).st_mode & stat.S_IXOTH:
                if not landlock:
                    raise OSError(
                        13, f"{path} is closed to other users, so programs would have to run as root"
                    )
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
