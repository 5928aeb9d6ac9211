"""What a process does to itself just before a program gets it: limits, another user, no privileges, Landlock,
seccomp.

Runs in the child, between fork and the program; nothing of it can be undone afterwards. Which walls there are
was found out before (`keeper.py`); this file builds them, in the order that lets each be built.
"""

import contextlib
import os
import resource
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from whetstone.sandbox import seccomp, syscalls

# Landlock's rights on files, by the version that introduced them.
_EXECUTE, _WRITE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_ALL_BY_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_ON_FILES = _EXECUTE | _WRITE | _READ_FILE | 1 << 14 | 1 << 15
_BIND_AND_CONNECT_TCP, _SCOPE_SOCKETS_AND_SIGNALS = 3, 3
SIGNALS_SCOPED_SINCE = 6  # the version of Landlock that keeps signals inside


@dataclass(frozen=True, kw_only=True)
class Walls:
    """What a child must put around itself, fixed when the keeper starts."""

    user: int | None  # the user and group to become; None: stay
    has_own_processes: bool  # a process namespace
    landlock: int  # its version, 0: none
    seccomp: bool
    readable: tuple[str, ...]  # for Landlock
    writable: tuple[str, ...]
    processes_elsewhere: int  # threads of the same user outside, which RLIMIT_NPROC counts too
    keeper_is_inside: bool  # the keeper has closed itself in already: its children are born behind the walls
    address_space_now: int  # bytes that the keeper itself takes


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """The limits of one run."""

    seconds: float
    memory_mb: int
    disk_mb: int
    processes: int
    limit_address_space: bool


def close_in(walls: Walls, ceilings: Ceilings) -> None:
    """Build every wall around this process that is not there yet."""
    set_limits(limits_of(walls, ceilings))
    if walls.user is None:
        syscalls.drop_capabilities()
    else:  # which takes the capabilities away as well
        if not walls.keeper_is_inside:
            give_up_groups(walls.user)
        os.setresuid(walls.user, walls.user, walls.user)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)  # its own /proc/self belongs to it
    if not walls.keeper_is_inside:
        for_good(walls, walls.writable)


def give_up_groups(user: int) -> None:
    """Belong to the program's group and to no other."""
    os.setgroups([])
    os.setresgid(user, user, user)


def for_good(walls: Walls, writable: Sequence[str]) -> None:
    """The walls that are inherited: no new privileges, Landlock, seccomp."""
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    if walls.landlock:
        _landlock(walls, writable)
    if walls.seccomp:
        if walls.has_own_processes:
            program = _FILTER
        elif walls.landlock >= SIGNALS_SCOPED_SINCE:
            program = _FILTER_ALONE
        else:
            program = seccomp.build(os.getpid(), unix_sockets=False)
        syscalls.load_seccomp(program)


_FILTER = seccomp.build() if seccomp.is_supported() else b""
_FILTER_ALONE = seccomp.build(unix_sockets=False) if seccomp.is_supported() else b""  # without namespaces


def limits_of(walls: Walls, ceilings: Ceilings) -> dict[int, tuple[int, int]]:
    """The rlimits of one run: which, soft, hard."""
    cpu = max(1, int(ceilings.seconds + 1.5))
    wanted = {
        resource.RLIMIT_CPU: (cpu, cpu + 1),
        resource.RLIMIT_FSIZE: (ceilings.disk_mb << 20,) * 2,
        resource.RLIMIT_NPROC: (ceilings.processes + walls.processes_elsewhere,) * 2,
    }
    if ceilings.limit_address_space:
        wanted[resource.RLIMIT_AS] = ((ceilings.memory_mb << 20) + walls.address_space_now,) * 2
    return wanted


def set_limits(wanted: Mapping[int, tuple[int, int]]) -> None:
    """These rlimits, or the lower ones that we have ourselves."""
    for which, (soft, hard) in wanted.items():
        try:
            resource.setrlimit(which, (soft, hard))
        except ValueError:  # we have a lower one ourselves, which can't be raised
            most = resource.getrlimit(which)[1]
            resource.setrlimit(which, (min(soft, most), min(hard, most)))


def all_rights(version: int) -> int:
    return _ALL_BY_VERSION[max(known for known in _ALL_BY_VERSION if known <= version)]


def _landlock(walls: Walls, writable: Sequence[str]) -> None:
    rights, version = all_rights(walls.landlock), walls.landlock
    attributes = struct.pack("Q", rights)
    if version >= 4:
        attributes += struct.pack("Q", _BIND_AND_CONNECT_TCP)
    if version >= SIGNALS_SCOPED_SINCE:
        attributes += struct.pack("Q", _SCOPE_SOCKETS_AND_SIGNALS)
    ruleset = syscalls.landlock_ruleset(attributes)
    try:
        _allow(ruleset, walls.readable, _EXECUTE | _READ_FILE | _READ_DIR)
        _allow(ruleset, writable, rights)
        syscalls.landlock_restrict(ruleset)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, paths: Sequence[str], rights: int) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                on_this = rights if os.path.isdir(path) else rights & _ON_FILES
                syscalls.landlock_allow(ruleset, on_this & ~(1 << 12), descriptor)  # never block devices
            finally:
                os.close(descriptor)
