"""Hostile programs in the sandbox, in every isolation mode: none paid, none escaped, nothing left behind.

A trial runs a few of them in one pool, in a random order, since what one leaves the next may find. Beside
what the programs print, canaries on the host tell: a file, a folder, a server, two Unix sockets and a
process.
"""

import contextlib
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.hostile_programs import PROGRAMS, SECRET, Hostile
from tests.torture import forks
from tests.torture.hostile_programs import MORE, TWICE
from tests.torture.trial import Outcome, Part, Setting

MODES = ("namespaces", "filters")
CHUNK = 12
ALL = (*PROGRAMS, *MORE)
PROBE = (
    "import os, time\n"
    "status = os.stat('.')\n"
    "old = max(abs(time.time() - status.st_mtime), abs(time.time() - status.st_atime)) > 600\n"
    "named = [name for name in os.listxattr('.') if name.startswith('user.')]\n"
    "print(os.listdir('.'), named, 'old' if old else 'fresh', "
    "oct(status.st_mode & 0o7000))"
)


class Canaries:
    """Things of the host that no program may reach."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "canary.txt"
        self.file.write_text(SECRET)
        os.chmod(folder, 0o755)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._path = f"/tmp/torture-{os.getpid()}.sock"  # short: socket names have a limit
        self._abstract = f"torture-{os.getpid()}"
        self._unix, self._nameless = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        Path(self._path).unlink(missing_ok=True)
        self._unix.bind(self._path)
        os.chmod(self._path, 0o777)
        self._nameless.bind("\0" + self._abstract)
        for listening in (self._unix, self._nameless):
            listening.listen()
        for listening in (self._server, self._unix, self._nameless):
            listening.setblocking(False)
        self._victim = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(3600)"])

    def fill_in(self, source: str) -> str:
        values = {
            "@PORT@": str(self._server.getsockname()[1]),
            "@SOCKET@": self._path,
            "@ABSTRACT@": self._abstract,
            "@FILE@": str(self.file),
            "@FOLDER@": str(self.file.parent),
            "@VICTIM@": str(self._victim.pid),
        }
        return re.sub(r"@[A-Z]+@", lambda found: values[found[0]], source)

    def losses(self) -> list[str]:
        """What was reached since the last time."""
        found = []
        for name, listening in (
            ("the server on 127.0.0.1", self._server),
            ("a Unix socket", self._unix),
            ("an abstract Unix socket", self._nameless),
        ):
            with contextlib.suppress(BlockingIOError):
                listening.accept()[0].close()
                found.append(f"{name} of the host was reached")
        if self._victim.poll() is not None:
            found.append("a process of the host was ended")
        if self.file.read_text() != SECRET or len(list(self.file.parent.iterdir())) != 1:
            found.append("the canary's folder was changed")
        return found

    def close(self) -> None:
        self._victim.kill()
        self._victim.wait()
        for listening in (self._server, self._unix, self._nameless):
            listening.close()
        Path(self._path).unlink(missing_ok=True)


def chunks(seed: int) -> list[list[int]]:
    """All programs in a random order, a few at a time."""
    order = list(range(len(ALL)))
    random.Random(f"{seed} programs").shuffle(order)
    return [order[start : start + CHUNK] for start in range(0, len(order), CHUNK)]


def names(seed: int) -> list[str]:
    return [f"{mode}/{number}" for number in range(len(chunks(seed))) for mode in MODES]


def run(name: str, setting: Setting) -> Outcome:
    from whetstone.sandbox.pool import IsolationUnavailable, LocalPool, SupervisorProcess
    from whetstone.sandbox.program import Limits

    mode, _, number = name.partition("/")
    limits = Limits(
        seconds=1.0, memory_mb=192, disk_mb=8, output_kb=64, processes=24, compile_seconds=5, total_seconds=10
    )
    try:
        SupervisorProcess(mode, "python", limits).close()
    except IsolationUnavailable as error:
        return Outcome(tried=0, skipped=f"programs at isolation {mode}: {error}")
    os.environ["WHET_TEST_SECRET"] = SECRET
    outcome = Outcome(tried=0)
    with (
        contextlib.closing(Canaries(setting.folder / "canaries")) as canaries,
        LocalPool(isolation=mode, limits=limits) as pool,
    ):
        _teach_expected_values(pool, limits)
        for place in chunks(setting.seed)[int(number)]:
            for _ in range(2 if ALL[place] in TWICE else 1):
                _try(ALL[place], pool, limits, canaries, outcome)
    outcome.losses += [f"left running: {command}" for command in forks.left_behind(10)]
    return outcome


def _teach_expected_values(pool, limits) -> None:
    """A first program whose tests hold the secret, so that later ones could find it in what they inherit."""
    from whetstone.rewards.programs import read_tests, run_tests
    from whetstone.sandbox.languages import LANGUAGES

    python = LANGUAGES["python"]
    tests = [
        f"assert f(1) == '{SECRET}'",
        {"call": "f", "args": [1], "expected": SECRET},
        {"stdin": "1", "stdout": SECRET},
        {"code": "print(f(1))", "stdout": SECRET},
    ]
    run_tests(pool, python, "def f(x): return 'x'", read_tests(tests, python, "f", "torture"), limits)
    run_tests(
        pool, python, "x = 'earlier program 7319'", read_tests(tests[2:3], python, "f", "torture"), limits
    )


def _try(hostile: Hostile, pool, limits, canaries: Canaries, outcome: Outcome) -> None:
    from whetstone.rewards.programs import ProgramTest, run_tests
    from whetstone.sandbox.languages import LANGUAGES, missing
    from whetstone.sandbox.program import Program

    if missing(hostile.language):
        outcome.details[f"not installed: {hostile.language}"] = 1
        return
    pool.start(hostile.language)
    before = forks.descendants()
    said: list[str] = []

    class Recording:
        statement, start, close = pool.statement, pool.start, pool.close

        def run(self, program: Program, limits):
            done = pool.run(program, limits)
            said.extend(result.stdout for result in done.results)
            return done

    checks = (ProgramTest(stdin="3\n", stdout=f"OPEN SESAME {SECRET}"),)
    source = canaries.fill_in(hostile.source)
    begun = time.monotonic()
    verdict = run_tests(Recording(), LANGUAGES[hostile.language], source, checks, limits)
    seconds = time.monotonic() - begun
    outcome.tried += 1
    outcome.details[verdict.outcome] = outcome.details.get(verdict.outcome, 0) + 1
    where = f"{hostile.name} ({pool.kind})"
    if verdict.outcome == "passed":
        outcome.losses.append(f"{where} was paid")
    if any("ESCAPED" in text for text in said):
        told = next(text for text in said if "ESCAPED" in text)
        outcome.losses.append(f"{where} escaped: {told[:200]}")
    if seconds > 40:
        outcome.losses.append(f"{where} held the pool for {seconds:.0f} s")
    outcome.losses += [f"{where}: {loss}" for loss in canaries.losses()]
    outcome.losses += [f"{where} left a process: {left}" for left in _left(before)]
    probe = pool.run(Program(language="python", source=PROBE), limits).results[0]
    if probe.stdout.split() != ["[]", "[]", "fresh", "0o0"]:
        outcome.losses.append(f"{where} left something: {probe.stdout.strip() or probe.stderr[-200:]}")


def _left(before: set[int]) -> Iterator[str]:
    """Processes that came with a program and stay; a supervisor that was replaced is the pool's own."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        forks.reap()
        new = forks.descendants() - before
        left = {pid for pid in new if "whetstone.sandbox.supervisor" not in forks.command_of(pid)}
        if not left:
            return
        time.sleep(0.02)
    yield from (forks.command_of(pid) for pid in left)


PART = Part(
    name="programs",
    unit="programs",
    summary="hostile programs in the sandbox, with namespaces and with filters: none paid, none escaped",
    names=names,
    run=run,
    limit_s=900,
)
