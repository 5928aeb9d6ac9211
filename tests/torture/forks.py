"""Real runs without Python's start: a process that has imported everything forks a child for each command.

The importing process never computes with torch and sets no number of threads (OMP_NUM_THREADS does), so no
thread pool is lost in a fork. A child is what a shell would start: a session of its own, its own standard
files, `whetstone.__main__.run`, the exit code and traceback that a fresh interpreter would give.
"""

import atexit
import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
_awaited: set[int] = set()  # processes whose exit code somebody will ask for


def import_everything() -> None:
    """What a run would import, so that children begin with it."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    import matplotlib.pyplot  # noqa: F401
    import peft  # noqa: F401
    import reasoning_gym  # noqa: F401
    import torch.distributed.checkpoint  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    import whetstone.__main__
    import whetstone.commands.config
    import whetstone.commands.tasks
    import whetstone.report
    import whetstone.rollout.async_source
    import whetstone.train  # noqa: F401


def adopt_orphans() -> None:
    """Descendants whose parent dies become children of this process: nothing can hide from a count."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@dataclass(kw_only=True)
class Run:
    """A command in a process of its own."""

    pid: int
    log: Path
    began: float
    code: int | None = None  # as a shell counts: minus the signal for one that was killed

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
                _awaited.discard(self.pid)
        return self.code

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, or None where it did not end in time."""
        deadline = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.code

    def kill(self, *, group: bool) -> None:
        """SIGKILL to it, or to all that it started as well."""
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.pid, signal.SIGKILL)
        self.wait(30)

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.is_file() else ""


def start(
    argv: Sequence[str],
    *,
    log: Path,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    prepare: Callable[[], None] | None = None,
) -> Run:
    """`whet argv` in a forked process; `prepare` is called in it first (limits, descriptors)."""

    def work() -> int:
        from whetstone import __main__ as cli

        return cli.run(list(argv))

    return fork(work, log=log, folder=folder, environment=environment, prepare=prepare, argv=["whet", *argv])


def fork(
    work: Callable[[], int],
    *,
    log: Path,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    prepare: Callable[[], None] | None = None,
    argv: Sequence[str] = ("whet",),
) -> Run:
    """Any function in a forked process that ends as an interpreter would."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    began = time.monotonic()
    pid = os.fork()
    if pid:
        _awaited.add(pid)
        return Run(pid=pid, log=log, began=began)
    code = 1
    try:
        _become_a_command(log, folder, environment or {}, argv)
        if prepare is not None:
            prepare()
        code = work()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    _end(code)
    raise AssertionError("unreachable")


def call(function: Callable[[], Any], log: Path, timeout_s: float = 120) -> Any:
    """What `function` returns, as JSON, computed in a forked process: this one stays clean."""
    result = log.with_suffix(".json")

    def work() -> int:
        result.write_text(json.dumps(function()), encoding="utf-8")
        return 0

    run = fork(work, log=log)
    if run.wait(timeout_s) != 0:
        run.kill(group=True)
        raise RuntimeError(f"{log} ended with {run.code}: {run.output[-800:]}")
    return json.loads(result.read_text(encoding="utf-8"))


def _become_a_command(
    log: Path, folder: Path | None, environment: Mapping[str, str], argv: Sequence[str]
) -> None:
    os.setsid()
    _awaited.clear()
    weakref.finalize._registry.clear()  # pyright: ignore  # what the parent has to clean up is not ours
    for number in range(1, signal.NSIG):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as Python itself does
        signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, 4096)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ.update(environment)
    if folder is not None:
        os.chdir(folder)
    sys.argv = list(argv)


def _end(code: int) -> None:
    """What an interpreter does at its end: wait for threads, call what was registered, flush."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except BaseException:
        code = code or 120
    finally:
        os._exit(code & 0xFF)


# ---- who is still there ------------------------------------------------------------------------------------


def descendants(of: int | None = None) -> set[int]:
    """Every living process beneath `of` (this one)."""
    parents: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = Path(entry.path, "stat").read_text(errors="replace").rpartition(")")[2].split()
                if fields[0] != "Z":
                    parents[int(entry.name)] = int(fields[1])
    found: set[int] = set()
    waiting = [of or os.getpid()]
    while waiting:
        above = waiting.pop()
        below = [pid for pid, parent in parents.items() if parent == above and pid not in found]
        found.update(below)
        waiting += below
    return found


def left_behind(patience_s: float, *, except_for: set[int] = frozenset()) -> list[str]:  # type: ignore[assignment]
    """What the descendants that do not end within `patience_s` were started as; they are killed then."""
    deadline = time.monotonic() + patience_s
    while (left := descendants() - except_for) and time.monotonic() < deadline:
        reap()
        time.sleep(0.02)
    names = [command_of(pid) for pid in sorted(left)]
    end_all(left)
    return names


def end_all(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    reap()


def reap() -> None:
    """Take in the ends of adopted orphans, whose exit codes nobody asked for."""
    for pid in set(_children()) - _awaited:
        with contextlib.suppress(OSError):
            os.waitpid(pid, os.WNOHANG)


def _children() -> Iterator[int]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = Path(entry.path, "stat").read_text(errors="replace").rpartition(")")[2].split()
                if int(fields[1]) == os.getpid() and fields[0] == "Z":
                    yield int(entry.name)


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
    return f"process {pid}"
