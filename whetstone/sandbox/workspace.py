"""The working directory of a program: created for every run, removed with its content afterwards.

A new directory has no attributes, owners or times of the previous one. Links are removed, never followed.
Traversal uses descriptors, one directory at a time, so that no depth is too deep.
"""

import contextlib
import errno
import fcntl
import os
import struct

from whetstone.sandbox.layers import SandboxEnv

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_SET_FLAGS = 0x40086602  # FS_IOC_SETFLAGS


def renew(env: SandboxEnv) -> None:
    """An empty folder that belongs to the program; what was beside it is gone."""
    clear(env)
    os.mkdir(env.work_dir, 0o700)
    if env.restrictions.user is not None:
        os.chown(env.work_dir, env.restrictions.user, env.restrictions.user)


def clear(env: SandboxEnv) -> None:
    """Remove the folder, and whatever a program of our own user may have put beside it or on its parent."""
    empty(env.parent)
    parent = os.open(env.parent, _FOLDER)
    try:
        for name in os.listxattr(parent):
            with contextlib.suppress(OSError):
                os.removexattr(parent, name)
        with contextlib.suppress(OSError):  # a file system without flags
            fcntl.ioctl(parent, _SET_FLAGS, struct.pack("l", 0))
        os.fchmod(parent, 0o755)
        os.utime(parent, (0, 0))
    finally:
        os.close(parent)


def empty(folder: str) -> None:
    """Remove everything in a folder."""
    os.chmod(folder, 0o755)
    folder_fd, depth = os.open(folder, _FOLDER), 0
    try:
        while True:
            is_empty, subfolder = _clear(folder_fd)
            if subfolder is not None:
                os.chmod(subfolder, 0o700, dir_fd=folder_fd)
                next_fd, depth = os.open(subfolder, _FOLDER, dir_fd=folder_fd), depth + 1
            elif depth:
                next_fd, depth = os.open("..", _FOLDER, dir_fd=folder_fd), depth - 1
            elif is_empty:
                return
            else:
                continue  # one more look: some file systems leave entries out while others are removed
            os.close(folder_fd)
            folder_fd = next_fd
    finally:
        os.close(folder_fd)


def _clear(folder_fd: int) -> tuple[bool, str | None]:
    """Remove files and empty folders; whether there was nothing, and the first folder that is not empty."""
    is_empty = True
    with os.scandir(folder_fd) as entries:
        for entry in entries:
            is_empty = False
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.name, dir_fd=folder_fd)
                continue
            try:
                os.rmdir(entry.name, dir_fd=folder_fd)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                return False, entry.name
    return is_empty, None
