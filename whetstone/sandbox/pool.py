"""Runs programs on warm supervisor processes, one per language. Each scoring process has its own pool.

The pool tries isolation levels from strong to weak and keeps the first that works; `layers` and `statement`
describe it. A supervisor that dies or does not answer is replaced. Expected values never come here.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

from whetstone.errors import UserError
from whetstone.sandbox import cgroup, protocol, spawn_helper
from whetstone.sandbox.languages import LANGUAGES, is_syntax_error, job_of, tools
from whetstone.sandbox.program import LOST, Limits, Outcome, Program, Result

KINDS = ("namespaces", "filters", "limits")  # strongest first
MISSING = {
    "namespaces": "",
    "filters": "no namespaces are allowed here: programs can see that other processes exist, and share the "
    "network's and the file system's names with them, though they can open neither; their disk is limited "
    "per file, not in all",
    "limits": "neither namespaces nor seccomp: programs can read every file this user can, use the network "
    "and signal this user's other processes",
}
_GRACE_S = 15.0  # beyond its limits, before a supervisor counts as dead
_START_S = 60.0
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_FIRST_USER = 0x30000000  # numbers that no system gives to a person
_user_numbers = iter(range(1 << 30))


class Pool(Protocol):
    """Runs programs: on this machine, or on a cluster."""

    def run(self, program: Program, limits: Limits) -> Outcome: ...
    def start(self, language: str) -> None: ...
    def close(self) -> None: ...
    @property
    def statement(self) -> str: ...


# Language, job and seconds to wait -> the supervisor's answer; `EOFError`, `TimeoutError`, `OSError`.
Request = Callable[[str, dict[str, Any], float], dict[str, Any]]


class IsolationUnavailable(Exception):
    """A supervisor could not enter the requested isolation level."""


class SupervisorProcess:
    """The pool's side of a supervisor process."""

    def __init__(self, kind: str, language: str, limits: Limits, without: tuple[str, ...] = ()) -> None:
        runner = LANGUAGES[language].runner
        self.folder: str | None = None
        if kind != "namespaces":
            self.folder = tempfile.mkdtemp(prefix="whet-")
            os.chmod(self.folder, 0o755)
            for name in ("box", "built"):
                os.mkdir(os.path.join(self.folder, name))
                os.chmod(os.path.join(self.folder, name), 0o755)
        own_end, other_end = socket.socketpair()
        helper = spawn_helper.descriptor() if runner == "exec" and kind == "namespaces" else None
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-m", "whetstone.sandbox.supervisor", str(other_end.fileno())],
            pass_fds=[other_end.fileno(), *([] if helper is None else [helper])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # the pool handles Ctrl-C in the terminal
            env=_clean_environment(tools(language).import_folders),
        )
        other_end.close()
        self._socket = own_end
        memory_mb = max(limits.memory_mb, limits.compile_memory_mb) + 2 * limits.disk_mb + 256
        self.cgroup = (
            None if "cgroup" in without else cgroup.join(self.process.pid, memory_mb, limits.processes + 96)
        )
        settings = {
            "kind": kind,
            "runner": runner,
            "without": without,
            "folder": self.folder,
            "visible": tools(language).visible,
            # Covered where they lie beneath visible ones: our package, with its answers, and where we work.
            "hidden": [_PACKAGE, os.path.join(os.path.dirname(_PACKAGE), "config"), os.getcwd()],
            "disk_mb": limits.disk_mb + 1,
            "spawn_helper": helper,
            "outside_user": free_user_number(),
        }
        try:
            answer = self.request(settings, _START_S)
        except (EOFError, TimeoutError, OSError):
            self.close()
            raise IsolationUnavailable("the supervisor ended while it started") from None
        if "refused" in answer:
            self.close()
            raise IsolationUnavailable(answer["refused"])
        self.layers: tuple[str, ...] = (*answer["ready"], *(("cgroup",) if self.cgroup else ()))

    def request(self, message: Any, patience_s: float) -> Any:
        """Send a message and wait for its answer; `TimeoutError`, `EOFError`, `OSError`."""
        protocol.send(self._socket.fileno(), message)
        if not select.select([self._socket], [], [], patience_s)[0]:
            raise TimeoutError
        return protocol.receive(self._socket.fileno())

    def hang_up(self) -> None:
        """It ends, and who waits for its answer gets an `EOFError`. From any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it and everything in it; nothing is left on disk. May be called twice."""
        self._socket.close()
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


def _clean_environment(import_folders: Sequence[str]) -> dict[str, str]:
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "PYTHONPATH": os.pathsep.join([os.path.dirname(_PACKAGE), *import_folders]),
        "PYTHONHASHSEED": "0",  # sets of text come in the same order every time
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONIOENCODING": "utf-8:replace",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def run_program(request: Request, program: Program, limits: Limits) -> Outcome:
    """What supervisors make of a program, in a second try if the first one is lost."""
    job = job_of(program, limits)
    patience_s = limits.total_seconds + limits.seconds + limits.compile_seconds + _GRACE_S
    for _ in range(2):
        try:
            answer = request(program.language, job.plain(), patience_s)
        except (EOFError, TimeoutError, OSError):
            continue
        assert len(answer["results"]) == len(job.inputs)
        results = [Result(**entry) for entry in answer["results"]]
        for number, result in enumerate(results):
            if result.outcome == "crash" and is_syntax_error(program.language, result.stderr):
                results[number] = replace(result, compile_error=True)
        return Outcome(results=tuple(results))
    return Outcome(results=(LOST,) * len(program.inputs))


class LocalPool(contextlib.AbstractContextManager["LocalPool"]):
    """Runs one program at a time on this machine."""

    def __init__(
        self, *, isolation: str = "auto", limits: Limits | None = None, without: tuple[str, ...] = ()
    ) -> None:
        """`without`: layers to leave out ("landlock", "cgroup"), to see what the others hold."""
        assert isolation in ("auto", *KINDS), isolation
        if sys.platform != "linux":
            raise UserError("Programs can only be run safely on Linux: use a Linux machine or container.")
        self._without = without
        self.kind: str | None = None if isolation == "auto" else isolation
        self.layers: tuple[str, ...] = ()
        self._failures: list[str] = []  # what stronger kinds said
        self._limits = limits or Limits()
        self._supervisors: dict[str, SupervisorProcess] = {}  # by language
        self._has_hung_up = False
        atexit.register(self.close)

    def run(self, program: Program, limits: Limits | None = None) -> Outcome:
        """Every run of the program, each in a process of its own."""
        return run_program(self.request, program, limits or self._limits)

    def request(self, language: str, job: Mapping[str, Any], patience_s: float) -> dict[str, Any]:
        """A job's answer; a supervisor that gives none is ended."""
        self.start(language)
        try:
            if self._has_hung_up:
                raise EOFError
            return self._supervisors[language].request(job, patience_s)
        except (EOFError, TimeoutError, OSError):
            self._supervisors.pop(language).close()
            raise

    def start(self, language: str) -> None:
        """Start the supervisor of a language; the first one determines the isolation level."""
        if language in self._supervisors:
            return
        for kind in (self.kind,) if self.kind else KINDS[:-1]:
            try:
                supervisor = SupervisorProcess(kind, language, self._limits, self._without)
            except IsolationUnavailable as error:
                self._failures.append(f"{kind}: {error}")
                continue
            self.kind, self.layers = kind, supervisor.layers
            self._supervisors[language] = supervisor
            return
        raise UserError(
            f"No safe way to run programs was found on this machine ({'; '.join(self._failures)}): allow "
            "user namespaces or seccomp, or accept the risk with sandbox_isolation: limits."
        )

    @property
    def statement(self) -> str:
        """What protects this machine from programs, and what does not."""
        assert self.kind is not None, "start a supervisor first"
        gap = MISSING[self.kind]
        if self.kind == "filters" and not any(layer.startswith("Landlock") for layer in self.layers):
            gap = gap.replace(
                "though they can open neither", "and can read the files that everybody can read"
            )
        sentence = f"Programs run in a sandbox: {', '.join(self.layers)}."
        return sentence + (f" Missing: {gap}." if gap else "")

    def hang_up(self) -> None:
        """Break off what runs, and what would: its owner gets no answer. From any thread."""
        self._has_hung_up = True
        for supervisor in list(self._supervisors.values()):
            supervisor.hang_up()

    def close(self) -> None:
        """End all supervisors. May be called twice."""
        while self._supervisors:
            self._supervisors.popitem()[1].close()

    def __exit__(self, *_: object) -> None:
        self.close()
        atexit.unregister(self.close)


def free_user_number() -> int:
    """A user number that nobody has, for a process that gives up its own."""
    return _FIRST_USER + (os.getpid() * 256 + next(_user_numbers) % 256) % (1 << 28)


@cache
def strongest_kind(isolation: str) -> str:
    """The kind of isolation that works on this machine, found by trying; `UserError` where none does."""
    if isolation == "limits":
        return "limits"
    with LocalPool(isolation=isolation) as pool:
        pool.start("python")
        assert pool.kind is not None
        return pool.kind


@cache
def shared_pool(isolation: str) -> LocalPool:
    """This process's own pool; it ends with the process."""
    return LocalPool(isolation=isolation)
