"""The data types of the sandbox: programs with inputs, limits, results.

Plain data, sent as JSON: nothing that a program can influence is ever unpickled. Expected values are not
here; they stay with the caller, which compares.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VALUE_MARKER = "\x1e\x02value\x03"  # stands before the value of a call in what a program prints; no secret


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one run of a program may use."""

    seconds: float = 5.0  # wall clock and processor time
    memory_mb: int = 512  # of all its processes together
    disk_mb: int = 32  # in its folder
    output_kb: int = 256  # on stdout, and as much on stderr
    processes: int = 32  # and threads
    compile_seconds: float = 20.0
    compile_memory_mb: int = 1536
    total_seconds: float = 60.0  # for the compilation and all runs together; later ones are not started
    limit_address_space: bool = True  # off for those who reserve far more than they use (node, java)


@dataclass(frozen=True, kw_only=True)
class Input:
    stdin: str = ""
    call: tuple[str, tuple[Any, ...]] | None = None  # (function, arguments), plain data
    code: str = ""  # in the program's language, put behind the program


@dataclass(frozen=True, kw_only=True)
class Program:
    """A source text in a language, and the runs that are wanted of it, each in a process of its own."""

    language: str
    source: str
    inputs: tuple[Input, ...] = (Input(),)


@dataclass(frozen=True, kw_only=True)
class Result:
    exit_code: int | None = None  # None: ended by a signal, or never started
    stdout: str = ""
    stderr: str
    timed_out: bool = False
    exceeded_limit: str | None = None  # "output", "memory": which limit ended it
    seconds: float = 0.0
    compile_error: bool = False

    @property
    def ok(self) -> bool:
        """It ended by itself, with exit code 0."""
        return self.exit_code == 0 and not self.timed_out and self.exceeded_limit is None

    @property
    def outcome(self) -> str:
        """`ok`, `compile_error`, `timeout` or `crash`."""
        if self.compile_error:
            return "compile_error"
        return "timeout" if self.timed_out else "ok" if self.ok else "crash"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """All runs of a program, in the order of its inputs."""

    results: tuple[Result, ...]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A program as a supervisor gets it: how to run it, not in which language."""

    runner: str  # "python", "klong", "sql": inside the sandbox's own interpreter; "exec": by commands
    file: str
    inputs: tuple[Mapping[str, Any], ...]  # "source", "stdin", "call"
    limits: Limits
    compilers: tuple[tuple[str, ...], ...] = ()  # tried in turn until one succeeds
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        return {**vars(self), "limits": vars(self.limits), "environment": dict(self.environment)}


def job_from(plain: Mapping[str, Any]) -> Job:
    return Job(**{**plain, "limits": Limits(**plain["limits"])})


NOT_STARTED = Result(stderr="not started: the time for the whole program was spent", timed_out=True)
LOST = Result(stderr="the sandbox died or did not answer, twice")
