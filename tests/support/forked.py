"""What a forked worker sees of the process that asked for it."""

import contextlib
import os
import sys
from multiprocessing.connection import Connection


def tell(connection: Connection) -> None:
    """Answer "look" with what is around, and end at anything else."""
    while connection.recv() == "look":
        print("looked", file=sys.stderr, flush=True)
        connection.send({
            "folder": os.getcwd(),
            "path": list(sys.path),
            "variables": sorted(os.environ),
            "files": _open_files(),
            "server": os.getppid(),
            "leads_its_group": os.getpgrp() == os.getpid(),
            "modules": list(sys.modules),
        })  # fmt: skip
    os._exit(3)


def _open_files() -> list[str]:
    """What is open beside the standard streams; the descriptor of the listing itself is gone by then."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            names += [os.readlink(f"/proc/self/fd/{number}")] * (int(number) > 2)
    return names
