"""The process that lives inside the sandbox, warm, and forks once for every run of a program.

It is number 1 of its own process namespace where there is one, so that a single call ends whatever a program
has started. It never sees an expected value. It serves one program at a time, and puts nothing of one into
the next: a forked process, an emptied folder. Started by `pool.py`, with a cleaned environment.
"""

import contextlib
import gc
import os
import resource
import select
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from whetstone.sandbox import frames, guard, inside, kernel, root, seccomp
from whetstone.sandbox.guard import Ceilings, Walls
from whetstone.sandbox.program import NEVER_BEGUN, Job, Limits, Result, job_from

_WATCH_S = 0.05  # between two looks at the memory of all processes of a program
_CHUNK = 1 << 16
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/box", "TMPDIR": "/box"}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this keeper works and what surrounds its programs."""

    box: str
    built: str
    walls: Walls
    layers: tuple[str, ...]
    has_proc: bool
    channel: int  # to the pool


class HungUp(Exception):
    """The pool is gone: so is the reason to go on."""


def main() -> None:
    """Settle, say so, serve until the pool hangs up."""
    channel = int(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = frames.receive(channel)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft != hard:  # a scoring process has a limit of its own, which is not meant for programs
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    try:
        inside.warm(settings["how"])  # before the walls: it reads files that are not there behind them
        place = _settle(settings, channel)
    except OSError as error:
        frames.send(channel, {"refused": str(error)})
        return
    gc.collect()
    gc.freeze()  # forks share what is there now
    gc.disable()
    frames.send(channel, {"ready": list(place.layers)})
    try:
        while True:
            job = job_from(frames.receive(channel))
            frames.send(channel, _serve(place, job))
    except (EOFError, BrokenPipeError, ConnectionResetError, HungUp):
        if settings["folder"]:
            shutil.rmtree(settings["folder"], ignore_errors=True)


def _settle(settings: dict[str, Any], channel: int) -> Place:
    """Go as far in as `settings["kind"]` says."""
    landlock = 0 if "landlock" in settings["without"] else kernel.landlock_version()
    has_seccomp = seccomp.is_supported()
    if settings["kind"] == "namespaces":
        world = root.enter(
            settings["visible"], settings["hidden"], settings["disk_mb"], settings["outside_user"]
        )
        box, built, user, has_proc = root.BOX, root.BUILT, world.user, world.has_proc
        spaces = "process, mount, network, ipc, host name" + (", user" if world.has_user_namespace else "")
        layers = [f"namespaces ({spaces})", "read-only root"]
    else:
        box, built = os.path.join(settings["folder"], "box"), os.path.join(settings["folder"], "built")
        user, has_proc = _other_user(settings, landlock), True
        layers = []
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)  # what a program leaves behind becomes ours
        if user is not None:
            os.chown(box, user, user)
        if settings["kind"] == "filters" and not has_seccomp:
            raise OSError(38, "seccomp is not to be had on this machine")
        if settings["kind"] == "limits":
            landlock, has_seccomp = 0, False
    inner = settings["kind"] == "namespaces"
    readable = (*root.SYSTEM, *root.SYSTEM_FILES, *settings["visible"], built)
    readable += ("/proc", "/etc") if inner else ()
    writable = (box, "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
    layers += [f"Landlock {landlock}"] if landlock else []
    layers += ["seccomp"] if has_seccomp else []
    layers += ["a user of its own"] if user is not None else []
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # a program of the same user can't look into us
    walls = Walls(
        user=user,
        has_own_processes=inner,
        landlock=landlock,
        seccomp=has_seccomp,
        readable=readable,
        writable=writable,
        processes_elsewhere=0 if inner or user is not None else _threads_of_user(),
        keeper_is_inside=inner,
        address_space_now=_address_space(),
    )
    if inner:
        # Children are born behind these walls, which saves each of them the time to build its own.
        guard.for_good(walls, (*writable, built))
    return Place(
        box=box,
        built=built,
        walls=walls,
        layers=(*layers, "rlimits"),
        has_proc=has_proc,
        channel=channel,
    )


def _other_user(settings: dict[str, Any], landlock: int) -> int | None:
    """The user that programs become without a namespace: only root can choose, and only one who can still
    reach the interpreter.
    """
    if os.geteuid() != 0:
        return None
    for path in settings["visible"]:
        while path != "/":
            if os.path.exists(path) and not os.stat(path).st_mode & stat.S_IXOTH:
                if not landlock:
                    raise OSError(13, f"{path} is closed to other users, so programs would have to run as root")
                return None
            path = os.path.dirname(path)
    return settings["outside_user"]


def _address_space() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # no /proc in here
        return 256 << 20


def _threads_of_user() -> int:
    """RLIMIT_NPROC counts all threads of a user on the machine."""
    count = 0
    for entry in os.scandir("/proc") if os.path.isdir("/proc/self") else ():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{entry.name}/task"))
    return count


# ---- a job ---------------------------------------------------------------------------------------------------


def _serve(place: Place, job: Job) -> dict[str, Any]:
    """Compile once, run every input; the next compiler has a try where the quick one fails or is too slow."""
    begun = time.monotonic()
    left = lambda: job.limits.total_seconds - (time.monotonic() - begun)  # noqa: E731
    results: list[Result] = []
    compile_s = 0.0
    for compiler in job.compilers or (None,):
        if compiler is not None:
            compiled = _compile(place, job, compiler, left())
            compile_s += compiled.seconds
            if not compiled.ok:
                results = results or [_refused(compiled)] * len(job.inputs)
                continue
        results = [_run_input(place, job, given, left()) for given in job.inputs]
        if not any(result.timed_out for result in results):
            break
    _empty(place, place.box)
    if job.compilers:
        _empty(place, place.built)
    return {"results": [asdict(result) for result in results], "compile_s": compile_s}


def _refused(compiled: Result) -> Result:
    return Result(**{**asdict(compiled), "compile_error": True, "stdout": ""})


def _compile(place: Place, job: Job, command: Sequence[str], left_s: float) -> Result:
    _empty(place, place.box)
    _empty(place, place.built)
    _write_source(place, job.file, job.inputs[0]["source"])
    limits = job.limits
    ceilings = Ceilings(
        seconds=min(limits.compile_seconds, max(0.1, left_s)),
        memory_mb=limits.compile_memory_mb,
        disk_mb=limits.disk_mb,
        processes=max(64, limits.processes),
        limit_address_space=False,  # compilers reserve much; the watch looks at what they use
    )
    compiled = _run(place, _executor(place, command, job.environment), b"", ceilings, limits)
    if compiled.ok:
        _keep(place)
    return compiled


def _keep(place: Place) -> None:
    """Move what a compiler made to where programs can read but not write."""
    for name in os.listdir(place.box):
        source = os.path.join(place.box, name)
        descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                target = os.path.join(place.built, name)
                with open(target, "wb") as copy:
                    shutil.copyfileobj(file, copy)
                os.chmod(target, 0o755)


def _run_input(place: Place, job: Job, given: dict[str, Any], left_s: float) -> Result:
    if left_s <= 0:
        return NEVER_BEGUN
    _empty(place, place.box)
    limits = job.limits
    ceilings = Ceilings(
        seconds=min(limits.seconds, left_s),
        memory_mb=limits.memory_mb,
        disk_mb=limits.disk_mb,
        processes=limits.processes,
        limit_address_space=job.limit_address_space,
    )
    if job.how == "exec":
        if not job.compilers:
            _write_source(place, job.file, given["source"])
        child = _executor(place, job.command, job.environment)
    else:
        child = lambda tell: inside.run(job.how, given["source"], given["call"], tell)  # noqa: E731
    return _run(place, child, given["stdin"].encode("utf-8", "replace"), ceilings, limits)


def _executor(place: Place, command: Sequence[str], extra: Any) -> Callable[[Callable[[bool], None]], None]:
    def start(tell: Callable[[bool], None]) -> None:
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; programs expect them
            signal.signal(number, signal.SIG_DFL)
        here = {**_ENVIRONMENT, "HOME": place.box, "TMPDIR": place.box, **extra}
        words = [part.replace("{built}", place.built) for part in command]
        os.execve(words[0], words, here)

    return start


def _write_source(place: Place, name: str, source: str) -> None:
    path = os.path.join(place.box, name)
    with open(path, "w", encoding="utf-8", errors="replace") as file:
        file.write(source)
    os.chmod(path, 0o644)


# ---- a run ---------------------------------------------------------------------------------------------------


def _run(
    place: Place,
    start: Callable[[Callable[[bool], None]], None],
    stdin: bytes,
    ceilings: Ceilings,
    limits: Limits,
) -> Result:
    """Fork, close the child in, let it go, watch it, end everything it started."""
    given = _as_file(place, stdin)
    pipes = [os.pipe() for _ in range(3)]  # stdout, stderr, and whether it compiled
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        _be_the_child(place, start, [given, pipes[0][1], pipes[1][1], pipes[2][1]], ceilings)
    for _, theirs in pipes:
        os.close(theirs)
    os.close(given)
    watch = _Watch(place, child, [ours for ours, _ in pipes], ceilings, limits.output_kb << 10)
    watch.until_it_ends(begun + ceilings.seconds)
    status, usage = _end_all(place, child)
    seconds = time.monotonic() - begun
    watch.drain()
    for ours, _ in pipes:
        os.close(ours)
    code = os.waitstatus_to_exitcode(status)
    return Result(
        exit_code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        stdout=watch.texts[0].decode("utf-8", "replace"),
        stderr=watch.texts[1].decode("utf-8", "replace"),
        timed_out=watch.timed_out or code == -signal.SIGXCPU,
        too_much=watch.too_much,
        seconds=seconds,
        peak_memory_mb=max(usage.ru_maxrss / 1024, watch.most_memory / 2**20),
        compile_error=watch.texts[2] == b"!",
    )


def _as_file(place: Place, stdin: bytes) -> int:
    """A file without a name that holds what the program shall read."""
    if not stdin:
        return os.open(os.devnull, os.O_RDONLY)
    file = os.open(place.built, os.O_TMPFILE | os.O_RDWR, 0o600)
    os.fchmod(file, 0o444)  # a program may open it once more, by /dev/stdin
    while stdin:
        stdin = stdin[os.write(file, stdin) :]
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _be_the_child(
    place: Place, start: Callable[[Callable[[bool], None]], None], ends: list[int], ceilings: Ceilings
) -> None:
    try:
        os.setsid()
        told = os.dup2(ends[3], 200, inheritable=False)
        for target, end in enumerate(ends[:3]):
            os.dup2(end, target)
        os.closerange(3, told)
        os.closerange(told + 1, 4096)
        os.chdir(place.box)
        guard.close_in(place.walls, ceilings)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        gc.enable()

        def tell(failed: bool) -> None:
            if failed:
                os.write(told, b"!")
            os.close(told)

        start(tell)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(2, f"sandbox: {error}\n".encode())
    os._exit(127)


class _Watch:
    """Reads what a program prints, and looks at its time and memory."""

    def __init__(
        self, place: Place, child: int, ends: list[int], ceilings: Ceilings, most_output: int
    ) -> None:
        self.texts = [b"", b"", b""]
        self.timed_out = False
        self.too_much: str | None = None
        self.most_memory = 0
        self._place, self._child, self._ends = place, child, ends
        self._most_memory = ceilings.memory_mb << 20
        self._limits = [most_output, most_output, 1]
        for end in ends:
            os.set_blocking(end, False)

    def until_it_ends(self, deadline: float) -> None:
        exited = os.pidfd_open(self._child) if hasattr(os, "pidfd_open") else -1
        poll = select.poll()
        for end in (*self._ends, exited):
            poll.register(end, select.POLLIN)
        poll.register(self._place.channel, 0)  # tells only that the other side has hung up
        next_look = time.monotonic() + _WATCH_S
        try:
            while True:
                now = time.monotonic()
                if now >= deadline:
                    self.timed_out = True
                    return
                for end, event in poll.poll(max(1, int(1000 * (min(deadline, next_look) - now)) + 1)):
                    if end == exited:
                        return
                    if end == self._place.channel:
                        _kill(self._place)
                        raise HungUp
                    if event & select.POLLIN:
                        self._read(self._ends.index(end))
                    else:
                        poll.unregister(end)
                if self.too_much:
                    return
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + _WATCH_S
                    self._look_at_memory()
        finally:
            os.close(exited)

    def drain(self) -> None:
        """What is left in the pipes after the end."""
        for number in range(3):
            while self._read(number):
                pass

    def _read(self, number: int) -> bool:
        try:
            piece = os.read(self._ends[number], _CHUNK)
        except BlockingIOError:
            return False
        room = self._limits[number] - len(self.texts[number])
        self.texts[number] += piece[:room]
        if len(piece) > room:
            self.too_much = self.too_much or "output"
            return False
        return bool(piece)

    def _look_at_memory(self) -> None:
        memory = sum(_memory_of(process) for process in _descendants(self._place))
        self.most_memory = max(self.most_memory, memory)
        if memory > self._most_memory:
            self.too_much = "memory"


def _memory_of(process: int) -> int:
    try:
        with open(f"/proc/{process}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return 0


def _descendants(place: Place) -> list[int]:
    """Every process that programs have started here."""
    if not place.has_proc or not os.path.isdir("/proc/self"):
        return []
    us = os.getpid()
    processes = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    if place.walls.has_own_processes:
        return [process for process in processes if process != us]
    parents = {}
    for process in processes:
        with contextlib.suppress(OSError, IndexError, ValueError):
            with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
                parents[process] = int(file.read().rpartition(")")[2].split()[1])
    found, waiting = [], [us]
    while waiting:
        above = waiting.pop()
        below = [process for process, parent in parents.items() if parent == above]
        found += below
        waiting += below
    return found


def _end_all(place: Place, child: int) -> tuple[int, Any]:
    """Kill what is left, until there is nothing; the child's own status and usage."""
    own: tuple[int, Any] | None = None
    patience = time.monotonic() + 5
    ended = False
    while True:
        try:
            process, status, usage = os.wait4(-1, os.WNOHANG if not ended else 0)
        except ChildProcessError:
            break
        if process == child:
            own = (status, usage)
            continue
        if process:
            continue
        _kill(place)
        ended = place.walls.has_own_processes  # one call gets them all; then it is enough to wait
        if not ended:
            time.sleep(0.001)
            if time.monotonic() > patience:
                raise OSError(16, "processes that can't be ended")  # the pool replaces us
    assert own is not None
    return own


def _kill(place: Place) -> None:
    if place.walls.has_own_processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        return
    if place.walls.user is not None:  # nobody else has this user: -1 as that user reaches them all at once
        helper = os.fork()
        if helper == 0:
            try:
                os.setresuid(place.walls.user, place.walls.user, place.walls.user)
                os.kill(-1, signal.SIGKILL)
            finally:
                os._exit(0)
        return
    for process in _descendants(place):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


def _empty(place: Place, folder: str) -> None:
    """Remove everything in a folder; links are removed, never followed. A folder inside is moved up before it is
    emptied, so that no depth is too deep.
    """
    if folder == place.box:
        os.chmod(folder, 0o700)
    waiting, number = [folder], 0
    while waiting:
        here = waiting.pop()
        for entry in list(os.scandir(here)):
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            target = entry.path
            while here != folder and os.path.lexists(target := os.path.join(folder, f".{number}")):
                number += 1
            if target != entry.path:
                os.rename(entry.path, target)
            waiting.append(target)
        if here != folder:
            os.rmdir(here)


if __name__ == "__main__":
    main()
