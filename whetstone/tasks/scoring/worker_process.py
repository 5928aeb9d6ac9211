"""A child process with a pipe to it: the scoring workers, and the maker of problems that need a fixed hash
seed.

Started as a fresh interpreter and not through `multiprocessing`, whose spawn runs the caller's main script
again in the child: that would import torch there, and a script without a `__main__` guard would start
itself. The child ends when the pipe does.
"""

import errno
import importlib
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe


class WorkerProcess:
    """Runs `module:function(connection)` in a new interpreter with a fixed hash seed, in `folder` or where
    we are.
    """

    def __init__(self, target: str, folder: str | None = None, *, keep_environment: bool = True) -> None:
        """`keep_environment`: whether it sees our environment variables, which may hold secrets."""
        self.connection, theirs = Pipe()
        environment = {
            **(os.environ if keep_environment else {"PATH": os.defpath, "LANG": "C.UTF-8"}),
            "PYTHONHASHSEED": "0",  # sets of strings come in the same order in every run
            "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",  # a process that forks has one thread
            "MPLBACKEND": "Agg",  # reasoning-gym pulls in matplotlib
        }
        command = [
            sys.executable,
            "-P",
            "-m",
            "whetstone.tasks.scoring.worker_process",
            target,
            str(theirs.fileno()),
        ]
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment, cwd=folder, stdin=subprocess.DEVNULL
        )
        theirs.close()

    def close(self) -> None:
        """End it now; nothing is left behind. May be called twice."""
        self.connection.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def main() -> None:
    """The child's side."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is the parent's business: it saves first and then ends us
    module, function = sys.argv[1].split(":")
    connection = Connection(int(sys.argv[2]))
    try:
        getattr(importlib.import_module(module), function)(connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone
    except OSError as error:
        if error.errno != errno.EBADF:  # a reward function has closed the pipe
            raise


if __name__ == "__main__":
    main()
