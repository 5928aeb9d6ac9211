"""The folder that a program works in: made anew for every run, and removed with everything in it.

A new folder has no attributes, owners or times of the one before. Links are removed, never followed. Goes
down and up by descriptors, one folder at a time, so that no depth is too deep.
"""

import contextlib
import errno
import fcntl
import os
import struct

from whetstone.sandbox.layers import Place

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_SET_FLAGS = 0x40086602  # FS_IOC_SETFLAGS


def renew(place: Place) -> None:
    """An empty folder that belongs to the program; what was beside it is gone."""
    clear(place)
    os.mkdir(place.box, 0o700)
    if place.walls.user is not None:
        os.chown(place.box, place.walls.user, place.walls.user)


def clear(place: Place) -> None:
    """Remove the folder, and whatever a program of our own user may have put beside it or on its parent."""
    empty(place.parent)
    parent = os.open(place.parent, _FOLDER)
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
    here, depth = os.open(folder, _FOLDER), 0
    try:
        while True:
            is_empty, full = _clear(here)
            if full is not None:
                os.chmod(full, 0o700, dir_fd=here)
                there, depth = os.open(full, _FOLDER, dir_fd=here), depth + 1
            elif depth:
                there, depth = os.open("..", _FOLDER, dir_fd=here), depth - 1
            elif is_empty:
                return
            else:
                continue  # one more look: some file systems leave entries out while others are removed
            os.close(here)
            here = there
    finally:
        os.close(here)


def _clear(here: int) -> tuple[bool, str | None]:
    """Remove files and empty folders; whether there was nothing, and the first folder that is not empty."""
    is_empty = True
    with os.scandir(here) as entries:
        for entry in entries:
            is_empty = False
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.name, dir_fd=here)
                continue
            try:
                os.rmdir(entry.name, dir_fd=here)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                return False, entry.name
    return is_empty, None
