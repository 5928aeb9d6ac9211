"""Linux system calls that Python's `os` lacks: namespaces, mounts, capabilities, Landlock, seccomp.

Thin wrappers; errors are `OSError`. `namespaces.py` and `restrict.py` decide what to call.
"""

import ctypes
import os
import struct
import sys

CLONE_NEWNS, CLONE_NEWUTS = 0x00020000, 0x04000000
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
NEW_NAMESPACES = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
SECCOMP_MODE_FILTER = 2
AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = -100, 0x8000, 1, 2

# The same numbers on both architectures.
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _call(name: str, *arguments: object) -> int:
    if _libc is None:
        raise OSError(38, f"{name}: not on this system")
    result = getattr(_libc, name)(*arguments)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def _syscall(number: int, *arguments: object) -> int:
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _call("syscall", ctypes.c_long(number), *wide)


def unshare(flags: int) -> None:
    _call("unshare", flags)


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    texts = [text.encode() if text else None for text in (source, target, kind, data)]
    _call("mount", *texts[:3], ctypes.c_ulong(flags), texts[3])


def make_read_only(target: str, *, recursive: bool) -> None:
    attributes = struct.pack("QQQQ", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    buffer = ctypes.create_string_buffer(attributes)
    try:
        flags = AT_RECURSIVE if recursive else 0
        _syscall(_MOUNT_SETATTR, AT_FDCWD, target.encode(), flags, buffer, len(attributes))
    except OSError:  # before Linux 5.12: one mount at a time, with the flags it must keep
        required = os.statvfs(target).f_flag & (MS_NODEV | MS_NOEXEC)
        mount("none", target, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | required)


def pivot_root(new: str) -> None:
    """Make `new` the root and let the old one go."""
    os.chdir(new)
    _syscall({"x86_64": 155, "aarch64": 41}[os.uname().machine], b".", b".")
    _call("umount2", b".", MNT_DETACH)
    os.chdir("/")


def prctl(option: int, value: int) -> None:
    _call("prctl", option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


def drop_capabilities() -> None:
    header = struct.pack("Ii", 0x20080522, 0)
    _call("capset", ctypes.create_string_buffer(header), ctypes.create_string_buffer(24))


def load_seccomp(program: bytes) -> None:
    """Put a filter on this process and all it will start; needs no_new_privs or a capability."""
    instructions = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(instructions))
    buffer = ctypes.create_string_buffer(header)
    _call("prctl", PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), buffer, 0, 0)


def landlock_version() -> int:
    """The version of the kernel's Landlock interface; 0: there is none."""
    try:
        return _syscall(_LANDLOCK_CREATE, 0, 0, 1)
    except OSError:
        return 0


def landlock_ruleset(attributes: bytes) -> int:
    return _syscall(_LANDLOCK_CREATE, ctypes.create_string_buffer(attributes), len(attributes), 0)


def landlock_allow(ruleset: int, access: int, path_fd: int) -> None:
    rule = ctypes.create_string_buffer(struct.pack("=Qi", access, path_fd))
    _syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0)


def landlock_restrict(ruleset: int) -> None:
    _syscall(_LANDLOCK_RESTRICT, ruleset, 0)
