"""Warm keepers, and programs handed to them: `run(program, limits)` for one, `LocalPool` for many.

The strongest isolation that the machine allows is found by trying; `layers` and `missing` say which it was.
A keeper serves one program at a time; one that dies or does not answer is replaced. Expected values never
come here. No pool is shared between processes: each scoring process has its own, of one keeper per language.
"""

import atexit
import contextlib
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from functools import cache
from typing import Any, Protocol

from whetstone.errors import UserError
from whetstone.sandbox import cgroup, protocol, spawn_helper
from whetstone.sandbox.languages import LANGUAGES, is_syntax_error, job_of, tools
from whetstone.sandbox.program import Job, Limits, Outcome, Program, Result

KINDS = ("namespaces", "filters", "limits")  # strongest first
MISSING = {
    "namespaces": "",
    "filters": "no namespaces are allowed here: programs can see that other processes exist, and share the "
    "network's and the file system's names with them, though they can open neither; their disk is limited "
    "per file, not in all",
    "limits": "neither namespaces nor seccomp: programs can read every file this user can, use the network "
    "and signal this user's other processes",
}
_GRACE_S = 15.0  # beyond its limits, before a keeper is taken for dead
_START_S = 60.0
_FIRST_USER = 0x30000000  # numbers that no system gives to a person
_numbers = iter(range(1 << 30))


class Pool(Protocol):
    """Whoever runs programs: processes here, or machines of a cluster."""

    def run(self, program: Program, limits: Limits) -> Outcome: ...
    def start(self, language: str) -> None: ...
    def close(self) -> None: ...
    @property
    def statement(self) -> str: ...


class Refused(Exception):
    """A keeper could not settle at the wanted strength."""


class Keeper:
    """A keeper process and the line to it."""

    def __init__(self, kind: str, language: str, limits: Limits, without: tuple[str, ...] = ()) -> None:
        how = LANGUAGES[language].how
        self.folder: str | None = None
        if kind != "namespaces":
            self.folder = tempfile.mkdtemp(prefix="whet-")
            os.chmod(self.folder, 0o755)
            for name in ("box", "built"):
                os.mkdir(os.path.join(self.folder, name))
                os.chmod(os.path.join(self.folder, name), 0o755)
        ours, theirs = socket.socketpair()
        built = spawn_helper.descriptor() if how == "exec" and kind == "namespaces" else None
        package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-m", "whetstone.sandbox.supervisor", str(theirs.fileno())],
            pass_fds=[theirs.fileno(), *([] if built is None else [built])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # Ctrl-C in the terminal is the pool's business
            env=_clean_environment(package),
        )
        theirs.close()
        self._line = ours
        memory_mb = max(limits.memory_mb, limits.compile_memory_mb) + 2 * limits.disk_mb + 256
        self.cgroup = None
        if "cgroup" not in without:
            self.cgroup = cgroup.join(self.process.pid, memory_mb, limits.processes + 96)
        settings = {
            "kind": kind,
            "how": how,
            "without": without,
            "folder": self.folder,
            "visible": tools(language).visible,
            "hidden": _hidden(),
            "disk_mb": limits.disk_mb + 1,
            "starter": built,
            "outside_user": free_user_number(),
        }
        try:
            answer = self.ask(settings, _START_S)
        except (EOFError, TimeoutError, OSError):
            self.close()
            raise Refused("the keeper ended while it started") from None
        if "refused" in answer:
            self.close()
            raise Refused(answer["refused"])
        self.layers: tuple[str, ...] = (*answer["ready"], *(("cgroup",) if self.cgroup else ()))

    def ask(self, message: Any, patience_s: float) -> Any:
        """Send a message and wait for its answer; `TimeoutError`, `EOFError`, `OSError`."""
        protocol.send(self._line.fileno(), message)
        if not select.select([self._line], [], [], patience_s)[0]:
            raise TimeoutError
        return protocol.receive(self._line.fileno())

    def close(self) -> None:
        """End it and everything in it; nothing is left on disk. May be called twice."""
        self._line.close()
        if self.process.poll() is None:
            try:
                self.process.wait(0.5)  # it sees that we hung up
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self.cgroup is not None:
            cgroup.leave(self.cgroup)
            self.cgroup = None


def _clean_environment(package: str) -> dict[str, str]:
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "PYTHONPATH": package,
        "PYTHONHASHSEED": "0",  # sets of text come in the same order every time
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONIOENCODING": "utf-8:replace",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def _hidden() -> list[str]:
    """Folders that are covered where they lie beneath a visible one: our own, with its answers, and where we
    work.
    """
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return [package, os.path.join(os.path.dirname(package), "config"), os.getcwd()]


class LocalPool:
    """At most `size` programs at a time, on this machine; usable from several threads."""

    def __init__(
        self,
        *,
        isolation: str = "auto",
        size: int = 1,
        limits: Limits | None = None,
        without: tuple[str, ...] = (),
    ) -> None:
        """`without`: layers to leave out ("landlock", "cgroup"), to see what the others hold."""
        assert isolation in ("auto", *KINDS), isolation
        if sys.platform != "linux":
            raise UserError(
                "Programs can only be run safely on Linux, by its namespaces and seccomp: use a Linux "
                "machine or container."
            )
        self._without = without
        self.kind: str | None = None if isolation == "auto" else isolation
        self.layers: tuple[str, ...] = ()
        self._why: list[str] = []  # what stronger kinds said
        self._limits = limits or Limits()
        self._idle: dict[str, list[Keeper]] = {}
        self._lock = threading.Lock()
        self._turns = threading.BoundedSemaphore(size)
        atexit.register(self.close)

    def run(self, program: Program, limits: Limits | None = None) -> Outcome:
        """Every run of the program, each in a process of its own."""
        limits = limits or self._limits
        job = job_of(program, limits)
        with self._turns:
            for _ in range(2):
                keeper = self._take(program.language)
                try:
                    patience = limits.total_seconds + limits.seconds + limits.compile_seconds + _GRACE_S
                    answer = keeper.ask(job.plain(), patience)
                except (EOFError, TimeoutError, OSError):
                    keeper.close()
                    continue
                with self._lock:
                    self._idle.setdefault(program.language, []).append(keeper)
                return _outcome(program.language, answer, job)
        return Outcome(results=(lost(),) * len(program.inputs))

    def start(self, language: str) -> None:
        """Have a keeper ready, and know what protects it."""
        keeper = self._take(language)
        with self._lock:
            self._idle.setdefault(language, []).append(keeper)

    @property
    def statement(self) -> str:
        """What protects this machine from programs, and what does not."""
        assert self.kind is not None, "start a keeper first"
        gap = MISSING[self.kind]
        if self.kind == "filters" and not any(layer.startswith("Landlock") for layer in self.layers):
            gap = gap.replace(
                "though they can open neither", "and can read the files that everybody can read"
            )
        said = f"Programs run in a sandbox: {', '.join(self.layers)}."
        return said + (f" Missing: {gap}." if gap else "")

    def close(self) -> None:
        """End all keepers. May be called twice."""
        with self._lock:
            keepers = [keeper for some in self._idle.values() for keeper in some]
            self._idle.clear()
        for keeper in keepers:
            keeper.close()

    def __enter__(self) -> "LocalPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        atexit.unregister(self.close)

    def _take(self, language: str) -> Keeper:
        with self._lock:
            if self._idle.get(language):
                return self._idle[language].pop()
        kinds = (self.kind,) if self.kind else KINDS[:-1]
        for kind in kinds:
            try:
                keeper = Keeper(kind, language, self._limits, self._without)
            except Refused as error:
                self._why.append(f"{kind}: {error}")
                continue
            self.kind, self.layers = kind, keeper.layers
            return keeper
        raise UserError(
            f"No safe way to run programs was found on this machine ({'; '.join(self._why)}): allow user "
            "namespaces or seccomp, or accept the risk with sandbox_isolation: limits."
        )


def _outcome(language: str, answer: Any, job: Job) -> Outcome:
    results = [Result(**entry) for entry in answer["results"]]
    marked = [
        Result(**{**vars(result), "compile_error": True})
        if result.outcome == "crash" and is_syntax_error(language, result.stderr)
        else result
        for result in results
    ]
    assert len(marked) == len(job.inputs)
    return Outcome(results=tuple(marked), compile_s=answer["compile_s"])


def lost() -> Result:
    return Result(
        exit_code=None,
        signal=None,
        stdout="",
        stderr="the sandbox died or did not answer, twice",
        timed_out=False,
        too_much=None,
        seconds=0.0,
        peak_memory_mb=0.0,
    )


def free_user_number() -> int:
    """A user number that nobody has, for a process that gives up its own."""
    return _FIRST_USER + (os.getpid() * 256 + next(_numbers) % 256) % (1 << 28)


@cache
def strongest_kind(isolation: str = "auto") -> str:
    """The kind of isolation that works on this machine, found by trying; `UserError` where none does."""
    if isolation == "limits":
        return "limits"
    with LocalPool(isolation=isolation) as pool:
        pool.start("python")
        assert pool.kind is not None
        return pool.kind


_shared: dict[str, LocalPool] = {}


def shared_pool(isolation: str = "auto", limits: Limits | None = None) -> LocalPool:
    """This process's own pool of one program at a time; it ends with the process."""
    if isolation not in _shared:
        _shared[isolation] = LocalPool(isolation=isolation, limits=limits)
    return _shared[isolation]


def run(program: Program, limits: Limits | None = None) -> Outcome:
    """Run one program in this process's own pool."""
    return shared_pool().run(program, limits)


def wait_until_gone(process: int, patience_s: float = 5.0) -> bool:
    """Whether a process has ended within the patience; for those who check that nothing is left."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, 0)
            time.sleep(0.02)
            continue
        return True
    return False
