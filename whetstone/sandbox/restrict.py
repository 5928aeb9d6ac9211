"""Restrictions that a process applies to itself: rlimits, user, capabilities, Landlock, seccomp.

Runs in the child, between fork and the program; none of it can be undone. `layers.py` decides which
restrictions there are; this module applies them in the order that the kernel requires.
"""

import contextlib
import os
import resource
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from whetstone.sandbox import seccomp, syscalls
from whetstone.sandbox.program import Limits

# Landlock's rights on files, by the version that introduced them.
_EXECUTE, _WRITE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_ALL_BY_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_ON_FILES = _EXECUTE | _WRITE | _READ_FILE | 1 << 14 | 1 << 15
_BIND_AND_CONNECT_TCP, _SCOPE_SOCKETS_AND_SIGNALS = 3, 3
SIGNALS_SCOPED_SINCE = 6  # the version of Landlock that keeps signals inside


@dataclass(frozen=True, kw_only=True)
class Restrictions:
    """What a child applies to itself, fixed when the supervisor starts."""

    user: int | None  # the user and group to become; None: stay
    has_pid_namespace: bool  # a process namespace
    landlock: int  # its version, 0: none
    seccomp: bool
    readable: tuple[str, ...]  # for Landlock
    writable: tuple[str, ...]
    other_processes: int  # threads of the same user outside, which RLIMIT_NPROC counts too
    supervisor_address_space: int  # bytes of address space that the zygote itself uses


def apply(restrictions: Restrictions, limits: Limits) -> None:
    """Apply what is not in effect yet: in namespaces children inherit the rest from the zygote."""
    set_limits(limits_of(restrictions, limits))
    if restrictions.user is None:
        syscalls.drop_capabilities()
    else:  # which takes the capabilities away as well
        if not restrictions.has_pid_namespace:
            drop_groups(restrictions.user)
        os.setresuid(restrictions.user, restrictions.user, restrictions.user)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)  # its own /proc/self belongs to it
    if not restrictions.has_pid_namespace:
        apply_irrevocable(restrictions)


def drop_groups(user: int) -> None:
    """Belong to the program's group and to no other."""
    os.setgroups([])
    os.setresgid(user, user, user)


def apply_irrevocable(restrictions: Restrictions) -> None:
    """Apply what children inherit: no new privileges, Landlock, seccomp."""
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    if restrictions.landlock:
        _landlock(restrictions)
    if restrictions.seccomp:
        if restrictions.has_pid_namespace:
            program = _FILTER
        elif restrictions.landlock >= SIGNALS_SCOPED_SINCE:
            program = _FILTER_ALONE
        else:
            program = seccomp.build(os.getpid(), unix_sockets=False)
        syscalls.load_seccomp(program)


_FILTER = seccomp.build() if seccomp.is_supported() else b""
_FILTER_ALONE = seccomp.build(unix_sockets=False) if seccomp.is_supported() else b""  # without namespaces


def limits_of(restrictions: Restrictions, limits: Limits) -> dict[int, tuple[int, int]]:
    """The rlimits of one run: which, soft, hard."""
    cpu = max(1, int(limits.seconds + 1.5))
    rlimits = {
        resource.RLIMIT_CPU: (cpu, cpu + 1),
        resource.RLIMIT_FSIZE: (limits.disk_mb << 20,) * 2,
        resource.RLIMIT_NPROC: (limits.processes + restrictions.other_processes,) * 2,
    }
    if limits.limit_address_space:
        size = (limits.memory_mb << 20) + restrictions.supervisor_address_space
        rlimits[resource.RLIMIT_AS] = (size, size)
    return rlimits


def set_limits(rlimits: Mapping[int, tuple[int, int]]) -> None:
    """These rlimits, or the lower ones that we have ourselves."""
    for limit, (soft, hard) in rlimits.items():
        try:
            resource.setrlimit(limit, (soft, hard))
        except ValueError:  # we have a lower one ourselves, which can't be raised
            current_hard = resource.getrlimit(limit)[1]
            resource.setrlimit(limit, (min(soft, current_hard), min(hard, current_hard)))


def _landlock(restrictions: Restrictions) -> None:
    version = restrictions.landlock
    rights = _ALL_BY_VERSION[max(known for known in _ALL_BY_VERSION if known <= version)]
    attributes = struct.pack("Q", rights)
    if version >= 4:
        attributes += struct.pack("Q", _BIND_AND_CONNECT_TCP)
    if version >= SIGNALS_SCOPED_SINCE:
        attributes += struct.pack("Q", _SCOPE_SOCKETS_AND_SIGNALS)
    ruleset = syscalls.landlock_ruleset(attributes)
    try:
        _allow(ruleset, restrictions.readable, _EXECUTE | _READ_FILE | _READ_DIR)
        _allow(ruleset, restrictions.writable, rights)
        syscalls.landlock_restrict(ruleset)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, paths: Sequence[str], rights: int) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                rights_here = rights if os.path.isdir(path) else rights & _ON_FILES
                syscalls.landlock_allow(ruleset, rights_here & ~(1 << 12), descriptor)  # never block devices
            finally:
                os.close(descriptor)
