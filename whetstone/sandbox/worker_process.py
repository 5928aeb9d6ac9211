"""A worker process with a pipe: scoring workers, and the generator of problems that need a fixed hash seed.

Starts a fresh interpreter instead of `multiprocessing`, whose spawn runs the caller's main script again in
the child: that would import torch there, and a script without a `__main__` guard would start itself.
"""

import contextlib
import importlib
import os
import resource
import signal
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe

MAX_OPEN_FILES = 65_536


class WorkerProcess:
    """Runs `module:function(connection)` in a new interpreter with a fixed hash seed."""

    def __init__(self, target: str, folder: str | None = None, *, keep_environment: bool = True) -> None:
        """`keep_environment`: whether it sees our environment variables, which may hold secrets."""
        self.connection, worker_end = Pipe()
        command = [sys.executable, "-P", "-m", __name__, target, str(worker_end.fileno())]
        self.process = subprocess.Popen(
            command,
            pass_fds=[worker_end.fileno()],
            env=environment_of(keep=keep_environment),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            process_group=0,  # with what it starts: both end together
        )
        worker_end.close()

    def close(self) -> None:
        """End it now; nothing is left behind. May be called twice."""
        if self.connection.closed:  # its number may belong to another process by now
            return
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def environment_of(*, keep: bool) -> dict[str, str]:
    """The environment variables of a worker; `keep`: with ours."""
    return {
        **(os.environ if keep else {"PATH": os.defpath, "LANG": "C.UTF-8"}),
        "PYTHONHASHSEED": "0",  # sets of strings come in the same order in every run
        "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",  # a process that forks has one thread
        "MPLBACKEND": "Agg",  # reasoning-gym pulls in matplotlib
    }


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def allow_open_files() -> None:
    """Raise the soft limit, which is usually 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def run_target(target: str, connection: Connection) -> None:
    """`module:function(connection)`; afterwards what it has started ends with us."""
    has_own_group = os.getpgrp() == os.getpid()
    module, function = target.split(":")
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        getattr(importlib.import_module(module), function)(connection)
    if has_own_group:
        with contextlib.suppress(Exception):  # in an isolated worker, the code guard refuses it
            os.killpg(0, signal.SIGKILL)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C: it saves, then ends us
    run_target(sys.argv[1], Connection(int(sys.argv[2])))


if __name__ == "__main__":
    main()
