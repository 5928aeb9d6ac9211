"""Linux namespaces and a nearly empty, read-only root file system without a network.

`enter` returns in a process that is PID 1 of its namespace. It sees system programs, the requested
interpreters, an empty working directory and devices without content. Needs user namespaces, or root.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from whetstone.sandbox import syscalls

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
SYSTEM_FILES = tuple(
    f"/etc/{name}" for name in ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime")
)
_DEVICES = ("null", "zero", "full", "random", "urandom")
# Where the new root can be assembled, hidden from others.
_MOUNT_POINTS = ("/mnt", "/media", "/srv", "/sys")
WORK_PARENT, BUILD_DIR, SPAWN_HELPER = "/box", "/built", "/start"
WORK_DIR = f"{WORK_PARENT}/home"  # created for every run: nothing of the previous run is left
PROGRAM_USER = 1  # inside the user namespace of a supervisor that root started


@dataclass(frozen=True, kw_only=True)
class NamespaceInfo:
    user: int | None  # the user that programs become
    has_user_namespace: bool
    has_proc: bool


def wait_for(child: int) -> NoReturn:
    """End as the child ends."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _, status = os.waitpid(child, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def enter(
    visible: Sequence[str],
    hidden: Sequence[str],
    disk_mb: int,
    outside_user: int,
    helper: bytes | None,
    outside: Callable[[int], NoReturn] = wait_for,
) -> NamespaceInfo:
    """Go into new namespaces; returns only in the new process number 1. `outside_user`: a free user number
    that programs become where root started us. `helper`: the content of `SPAWN_HELPER`. `outside`: what the
    process does that stays outside the process namespace (it shares all the others), given its child.
    """
    is_root = os.geteuid() == 0
    has_user_namespace = _unshare(is_root, outside_user)
    child = os.fork()
    if child:
        outside(child)
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.umask(0o022)  # programs are another user: the folders of the new root must be open to them
    syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    user = None
    if is_root:
        user = PROGRAM_USER if has_user_namespace else outside_user
    has_proc = _build_root(visible, hidden, disk_mb, helper)
    return NamespaceInfo(user=user, has_user_namespace=has_user_namespace, has_proc=has_proc)


def _unshare(is_root: bool, outside_user: int) -> bool:
    """New namespaces, with a new user namespace if that is allowed; root may do without one."""
    user, group, own_pid = os.geteuid(), os.getegid(), os.getpid()
    if not is_root:
        syscalls.unshare(syscalls.NEW_NAMESPACES | syscalls.CLONE_NEWUSER)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"1000 {user} 1")
        _write("/proc/self/gid_map", f"1000 {group} 1")
        return True
    # A map of two users can only be written from outside: by a child that is left behind.
    ready, notify = os.pipe()
    mapper = os.fork()
    if mapper == 0:
        try:
            os.close(notify)
            if os.read(ready, 1):
                lines = f"0 0 1\n{PROGRAM_USER} {outside_user} 1"
                _write(f"/proc/{own_pid}/uid_map", lines)
                _write(f"/proc/{own_pid}/gid_map", lines)
            os._exit(0)
        except OSError:
            os._exit(1)
    os.close(ready)
    try:
        syscalls.unshare(syscalls.CLONE_NEWUSER)
    except OSError:
        os.close(notify)
        os.waitpid(mapper, 0)
        syscalls.unshare(syscalls.NEW_NAMESPACES)
        return False
    os.write(notify, b"1")
    os.close(notify)
    _, status = os.waitpid(mapper, 0)
    if status:
        raise OSError(1, "the users of a new namespace could not be written")
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    syscalls.unshare(syscalls.NEW_NAMESPACES)
    return True


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _build_root(visible: Sequence[str], hidden: Sequence[str], disk_mb: int, helper: bytes | None) -> bool:
    """The new root; whether it has a /proc."""
    needed = [path for path in (*SYSTEM, *SYSTEM_FILES, *visible) if os.path.exists(path)]
    new = next(
        folder
        for folder in _MOUNT_POINTS
        if os.path.isdir(folder) and not any(path.startswith(folder + "/") for path in needed)
    )
    syscalls.mount("none", new, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "size=4m,mode=755")
    bound: list[str] = []
    for path in needed:
        is_bound = any(path == above or path.startswith(above + "/") for above in bound)
        if not is_bound and _bind(path, new):
            bound.append(path)
    for path in hidden:
        if os.path.isdir(new + path):  # beneath something shown: an empty folder covers it
            syscalls.mount(
                "none", new + path, "tmpfs", syscalls.MS_RDONLY | syscalls.MS_NOSUID, "size=4k,mode=555"
            )
    _devices(new)
    for name, text in (("passwd", f"nobody:x:1:1::{WORK_DIR}:/bin/false\n"), ("group", "nogroup:x:1:\n")):
        os.makedirs(f"{new}/etc", exist_ok=True)
        _write(f"{new}/etc/{name}", text)
    if helper is not None:
        with open(new + SPAWN_HELPER, "wb") as file:
            file.write(helper)
        os.chmod(new + SPAWN_HELPER, 0o755)
    os.mkdir(f"{new}/proc")
    safe = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC | syscalls.MS_RDONLY
    has_proc = False  # inside a container whose own /proc is covered in part: programs go without
    with contextlib.suppress(OSError):
        syscalls.mount("proc", f"{new}/proc", "proc", safe)
        has_proc = True
    for name in ("tmp", "var/tmp"):
        os.makedirs(os.path.dirname(f"{new}/{name}"), exist_ok=True)
        # An interpreter that lies beneath it keeps its place, read-only; TMPDIR names the box all the same.
        if not os.path.lexists(f"{new}/{name}"):
            os.symlink(WORK_DIR, f"{new}/{name}")
    for folder in (WORK_PARENT, BUILD_DIR):
        os.mkdir(new + folder)
        size = f"size={disk_mb}m,nr_inodes=4096,mode=755"
        syscalls.mount("none", new + folder, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, size)
    syscalls.pivot_root(new)
    syscalls.make_read_only("/", recursive=False)
    return has_proc


def _bind(path: str, new: str) -> bool:
    """Put `path` into the new root; False for a link, which shows nothing by itself."""
    target = new + path
    os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return False
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        with open(target, "w", encoding="ascii"):
            pass
    syscalls.mount(path, target, None, syscalls.MS_BIND | syscalls.MS_REC)
    syscalls.make_read_only(target, recursive=True)
    return True


def _devices(new: str) -> None:
    os.makedirs(f"{new}/dev")
    for name in _DEVICES:
        if os.path.exists(f"/dev/{name}"):
            _write(f"{new}/dev/{name}", "")
            syscalls.mount(f"/dev/{name}", f"{new}/dev/{name}", None, syscalls.MS_BIND)
    for name, suffix in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{suffix}", f"{new}/dev/{name}")
    os.symlink(WORK_DIR, f"{new}/dev/shm")
