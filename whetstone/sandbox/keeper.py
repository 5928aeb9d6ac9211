"""The process that lives inside the sandbox, warm, and forks once for every run of a program.

It is number 1 of its own process namespace where there is one, so that a single call ends whatever a program
has started. It never sees an expected value. It serves one program at a time, and puts nothing of one into
the next: a forked process, an emptied folder. Started by `pool.py`, with a cleaned environment.
"""

import _signal  # pyright: ignore[reportMissingImports]
import contextlib
import errno
import gc
import os
import resource
import signal
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from whetstone.sandbox import frames, guard, inside
from whetstone.sandbox.guard import Ceilings
from whetstone.sandbox.program import NEVER_BEGUN, Job, Limits, Result, job_from
from whetstone.sandbox.settle import Place, settle
from whetstone.sandbox.watch import HungUp, Watch, end_all

_IGNORED_BY_PYTHON = (int(signal.SIGPIPE), int(signal.SIGXFSZ))
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_Begin = Callable[[list[int]], int]  # from the descriptors of a child's streams to the child
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/box", "TMPDIR": "/box"}


def main() -> None:
    """Settle, say so, serve until the pool hangs up."""
    channel = int(sys.argv[1])
    os.set_inheritable(channel, False)
    settings = frames.receive(channel)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft != hard:  # a scoring process has a limit of its own, which is not meant for programs
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    try:
        inside.warm(settings["how"])  # before the walls: it reads files that are not there behind them
        place = settle(settings, channel)
    except OSError as error:
        frames.send(channel, {"refused": str(error)})
        return
    gc.collect()
    gc.freeze()  # forks share what is there now
    gc.disable()
    try:
        frames.send(channel, {"ready": list(place.layers)})  # a run that failed meanwhile has hung up
        while True:
            job = job_from(frames.receive(channel))
            frames.send(channel, _serve(place, job))
    except (EOFError, BrokenPipeError, ConnectionResetError, HungUp):
        if settings["folder"]:
            import shutil  # not at the top: it brings libraries that every fork would have to carry

            shutil.rmtree(settings["folder"], ignore_errors=True)


# ---- a job -------------------------------------------------------------------------------------------------


def _serve(place: Place, job: Job) -> dict[str, Any]:
    """Compile once, run every input; the next compiler has a try where the first fails or is too slow."""
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
    return {"results": [vars(result) for result in results], "compile_s": compile_s}


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
    compiled = _run(place, _by_command(place, command, job.environment, ceilings), b"", ceilings, limits)
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
                    while piece := file.read(1 << 20):
                        copy.write(piece)
                os.chmod(target, 0o755)


def _run_input(place: Place, job: Job, given: Mapping[str, Any], left_s: float) -> Result:
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
        begin = _by_command(place, job.command, job.environment, ceilings)
    else:
        begin = _by_fork(
            place, lambda tell: inside.run(job.how, given["source"], given["call"], tell), ceilings
        )
    return _run(place, begin, given["stdin"].encode("utf-8", "replace"), ceilings, limits)


def _by_fork(place: Place, start: Callable[[Callable[[bool], None]], None], ceilings: Ceilings) -> _Begin:
    """In a copy of this process."""

    def begin(ends: list[int]) -> int:
        child = os.fork()
        if child == 0:
            _be_the_child(place, start, ends, ceilings)
        return child

    return begin


def _by_command(place: Place, command: Sequence[str], extra: Mapping[str, str], ceilings: Ceilings) -> _Begin:
    """In a process that has nothing of this one: `start.c` does what `_be_the_child` would do. Copying this
    process and giving the copy up again costs more than most programs take.
    """
    here = {**_ENVIRONMENT, "HOME": place.box, "TMPDIR": place.box, **extra}
    words = [part.replace("{built}", place.built) for part in command]
    starter = place.starter
    if starter is None:
        return _by_fork(place, lambda tell: _become(words, here), ceilings)
    limits = guard.limits_of(place.walls, ceilings)
    user = -1 if place.walls.user is None else place.walls.user
    first = [starter, place.box, str(user), str(len(limits))]
    numbers = [str(number) for which, ends in limits.items() for number in (int(which), *ends)]

    def begin(ends: list[int]) -> int:
        streams = [(os.POSIX_SPAWN_DUP2, end, target) for target, end in enumerate(ends[:3])]
        return os.posix_spawn(
            starter, [*first, *numbers, *words], here, file_actions=streams, setsigdef=_IGNORED_BY_PYTHON
        )

    return begin


def _become(words: list[str], environment: Mapping[str, str]) -> None:
    for number in _IGNORED_BY_PYTHON:
        _signal.signal(number, 0)  # the default; `signal.signal` takes longer, for its named numbers
    os.execve(words[0], words, environment)


def _write_source(place: Place, name: str, source: str) -> None:
    path = os.path.join(place.box, name)
    with open(path, "w", encoding="utf-8", errors="replace") as file:
        file.write(source)
    os.chmod(path, 0o644)


# ---- a run -------------------------------------------------------------------------------------------------


def _run(place: Place, begin: _Begin, stdin: bytes, ceilings: Ceilings, limits: Limits) -> Result:
    """Begin it in a process that is closed in, watch it, end everything it started."""
    given = _as_file(place, stdin)
    pipes = [os.pipe() for _ in range(3)]  # stdout, stderr, and whether it compiled
    begun = time.monotonic()
    child = begin([given, *(theirs for _, theirs in pipes)])
    for _, theirs in pipes:
        os.close(theirs)
    os.close(given)
    watch = Watch(place, child, [ours for ours, _ in pipes], ceilings, limits.output_kb << 10)
    watch.until_it_ends(begun + ceilings.seconds)
    status, usage = end_all(place, child)
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


def _empty(place: Place, folder: str) -> None:
    """Remove everything in a folder; links are removed, never followed. Goes down and up by descriptors, one
    folder at a time, so that no depth is too deep.
    """
    if folder == place.box:
        os.chmod(folder, 0o700)
    here, depth = os.open(folder, _FOLDER), 0
    try:
        while True:
            is_empty, full = _clear(here)
            if full is not None:
                os.chmod(full, 0o700, dir_fd=here)
                there, depth = os.open(full, _FOLDER, dir_fd=here), depth + 1
            elif depth:
                there, depth = os.open("..", _FOLDER, dir_fd=here), depth - 1
            elif is_empty:
                return
            else:
                continue  # one more look: some file systems leave entries out while others are removed
            os.close(here)
            here = there
    finally:
        os.close(here)


def _clear(here: int) -> tuple[bool, str | None]:
    """Remove files and empty folders; whether there was nothing, and the first folder that is not empty."""
    is_empty = True
    with os.scandir(here) as entries:
        for entry in entries:
            is_empty = False
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.name, dir_fd=here)
                continue
            try:
                os.rmdir(entry.name, dir_fd=here)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                return False, entry.name
    return is_empty, None


if __name__ == "__main__":
    main()
