"""One process writes into a run folder: it holds a lock there, which the kernel frees when it ends."""

import errno
import fcntl
import logging
import os
import socket
from pathlib import Path
from typing import Self

from whetstone.errors import UserError

logger = logging.getLogger("whetstone")

NAME = ".lock"
MAX_TRIES = 100
WAIT_OR_RENAME = "wait until it ends, or choose another run_name"
_WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}  # some network file systems
_held: set[int] = set()


def _leave_to_parent() -> None:
    """A forked process that outlives us must not keep our locks."""
    for handle in _held:
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


class RunLock:
    """In a `with`: the lock of `folder`, which is made where it is missing. `UserError` if it is held."""

    def __init__(self, folder: Path, *, remedy: str = WAIT_OR_RENAME, shared: bool = False) -> None:
        """`shared`: several may hold it, beside none that do not share it."""
        self._folder, self._remedy = folder, remedy
        self._mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        self._handle = -1

    def __enter__(self) -> Self:
        self._handle = self._acquire()
        return self

    def __exit__(self, *_: object) -> None:
        _release(self._folder, self._handle)

    def renamed(self, moved: Path) -> None:
        """The folder is `moved` now: leave that one, and hold the lock of a new one in its place."""
        old, self._handle = self._handle, self._acquire()
        _release(moved, old)

    def _acquire(self) -> int:
        path = self._folder / NAME
        for number in range(MAX_TRIES):
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            except OSError as error:
                raise UserError(
                    f"The folder {self._folder} can't be written ({error.filename}: {error.strerror}): set "
                    "output_dir to a place you may write to."
                ) from None
            try:
                fcntl.flock(handle, self._mode | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _holder(handle)
                os.close(handle)
                raise UserError(f"{self._folder} is in use by {holder}: {self._remedy}.") from None
            except OSError as error:
                if error.errno not in _WITHOUT_LOCKS:
                    raise
                logger.warning(
                    f"The file system of {self._folder} has no locks ({error.strerror}): nothing prevents a "
                    "second process from writing there, so make sure that none does."
                )
            # Else its holder deleted or renamed it meanwhile. In some buckets it is never found again.
            if _is_file_at(handle, path) or number == MAX_TRIES - 1:
                break
            os.close(handle)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()} {socket.gethostname()}".encode(), 0)
        _held.add(handle)
        return handle


def _release(folder: Path, handle: int) -> None:
    """Of several that share it, the last one deletes the file."""
    if handle not in _held:  # in a forked process
        return
    _held.remove(handle)
    path = folder / NAME
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_file_at(handle, path):
            path.unlink()
    except OSError:
        pass  # shared, no locks here, or the folder is gone
    os.close(handle)


def _is_file_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False


def _holder(handle: int) -> str:
    """Who wrote its number and host into the file."""
    pid, _, host = os.pread(handle, 300, 0).decode(errors="replace").partition(" ")
    if not pid.isdecimal():
        return "another process"
    if (int(pid), host) == (os.getpid(), socket.gethostname()):
        return "an earlier run of this process that was not closed"
    return f"process {pid} on {host}"
