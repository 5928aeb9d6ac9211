"""A process with limits of memory and time, for what files of a model make a library do: chat templates are
programs, and a tokenizer.json may ask for any amount of work.
"""

import atexit
import json
import os
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

WAIT_S = 60.0  # for an answer, beside the CPU time that it may take
_lock = threading.Lock()
_workers: list[subprocess.Popen[str]] = []  # at most one


def ask(kind: str, seconds: float, memory: int, /, **arguments: Any) -> dict[str, str] | None:
    """`text` or `error` of a `template` or a `tokenizer`; None: it took more than its CPU time or memory."""
    request = {"kind": kind, "seconds": seconds, "memory": memory, "arguments": arguments}
    line = json.dumps(request, default=str) + "\n"
    with _lock:
        worker = _workers[0] if _workers else _start()
        assert worker.stdin is not None and worker.stdout is not None
        try:
            worker.stdin.write(line)
            worker.stdin.flush()
            if select.select([worker.stdout], [], [], WAIT_S + seconds)[0]:
                return json.loads(worker.stdout.readline())
        except (OSError, ValueError):  # its limits have ended it
            pass
        _end()
        return None


def _start() -> subprocess.Popen[str]:
    command = [sys.executable, "-P", str(Path(__file__).with_name("limited_worker.py"))]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    worker = subprocess.Popen(command, text=True, start_new_session=True, env=environment, **pipes)
    assert worker.stdout is not None
    if not worker.stdout.readline():
        raise RuntimeError(f"{' '.join(command)} does not start")
    _workers.append(worker)
    return worker


def _end() -> None:
    for worker in _workers:
        worker.kill()
        worker.wait()
    _workers.clear()


def _forget() -> None:
    """In a forked process, which has the same pipes."""
    global _lock
    _lock = threading.Lock()
    _workers.clear()


atexit.register(_end)
os.register_at_fork(after_in_child=_forget)
