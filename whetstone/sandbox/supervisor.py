"""The process that runs programs for a pool: it writes their files, watches them, reads what they print.

Programs themselves are started by another process, the zygote, which is behind the sandbox's layers and has
nothing of any program in its memory. Neither ever sees an expected value. A keeper serves one program at a
time, and puts nothing of one into the next. Started by `pool.py`, with a cleaned environment.
"""

import contextlib
import os
import resource
import signal
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NoReturn

from whetstone.sandbox import interpreters, protocol, syscalls, workspace, zygote
from whetstone.sandbox.layers import Place, settle
from whetstone.sandbox.monitor import Host, HungUp, Watch
from whetstone.sandbox.program import NEVER_BEGUN, Job, Limits, Result, job_from
from whetstone.sandbox.restrict import Ceilings, Walls
from whetstone.sandbox.zygote import Link

_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}


def main() -> None:
    """Fork the zygote, say that it is ready, serve until the pool hangs up."""
    os.umask(0o022)
    channel = int(sys.argv[1])
    os.set_inheritable(channel, False)
    settings = protocol.receive(channel)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft != hard:  # a scoring process has a limit of its own, which is not meant for programs
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    ours, theirs = zygote.pair()
    first = os.getpid()

    def stay_outside(child: int) -> NoReturn:
        theirs.close()
        _keep_house(channel, ours, child, settings)

    try:
        interpreters.warm(settings["how"])  # before the layers: it reads files that are not there behind them
        place = settle(settings, stay_outside)
    except OSError as error:
        if os.getpid() == first:
            protocol.send(channel, {"refused": str(error)})
        else:
            theirs.send({"refused": str(error)})
        return
    os.close(channel)
    ours.close()
    theirs.send({"place": asdict(place)})
    zygote.serve(place, theirs)


def _keep_house(channel: int, link: Link, child: int, settings: dict[str, Any]) -> NoReturn:
    """The keeper's own life: it ends with the pool or with the zygote."""
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)  # a program of the same user can't look into us
    try:
        answer, _ = link.receive()
        if "refused" in answer:
            protocol.send(channel, answer)
        else:
            place = _place_from(answer["place"])
            host = Host(place=place, channel=channel, zygote=1 if place.walls.has_own_processes else child)
            protocol.send(channel, {"ready": list(place.layers)})  # a run that failed meanwhile has hung up
            while True:
                job = job_from(protocol.receive(channel))
                protocol.send(channel, Keeper(host, link).serve(job))
    except (EOFError, BrokenPipeError, ConnectionResetError, HungUp):
        pass
    link.close()  # the zygote ends what runs, and itself
    os.waitpid(child, 0)
    if settings["folder"]:
        import shutil

        shutil.rmtree(settings["folder"], ignore_errors=True)
    os._exit(0)


def _place_from(plain: Mapping[str, Any]) -> Place:
    walls = Walls(
        **{**plain["walls"], **{name: tuple(plain["walls"][name]) for name in ("readable", "writable")}}
    )
    return Place(**{**plain, "walls": walls, "layers": tuple(plain["layers"])})


class Keeper:
    """Runs one job."""

    def __init__(self, host: Host, link: Link) -> None:
        self._host, self._place, self._link = host, host.place, link

    def serve(self, job: Job) -> dict[str, Any]:
        """Compile once, run every input; the next compiler has a try where the first fails or is too slow."""
        begun = time.monotonic()
        left = lambda: job.limits.total_seconds - (time.monotonic() - begun)  # noqa: E731
        results: list[Result] = []
        compile_s = 0.0
        for compiler in job.compilers or (None,):
            if compiler is not None:
                compiled = self._compile(job, compiler, left())
                compile_s += compiled.seconds
                if not compiled.ok:
                    refused = Result(**{**asdict(compiled), "compile_error": True, "stdout": ""})
                    results = results or [refused] * len(job.inputs)
                    continue
            results = [self._run_input(job, given, left()) for given in job.inputs]
            if not any(result.timed_out for result in results):
                break
        workspace.clear(self._place)
        if job.compilers:
            workspace.empty(self._place.built)
        return {"results": [vars(result) for result in results], "compile_s": compile_s}

    def _compile(self, job: Job, command: Sequence[str], left_s: float) -> Result:
        workspace.renew(self._place)
        workspace.empty(self._place.built)
        self._write_source(job.file, job.inputs[0]["source"])
        limits = job.limits
        ceilings = Ceilings(
            seconds=min(limits.compile_seconds, max(0.1, left_s)),
            memory_mb=limits.compile_memory_mb,
            disk_mb=limits.disk_mb,
            processes=max(64, limits.processes),
            limit_address_space=False,  # compilers reserve much; the watch looks at what they use
        )
        compiled = self._run(self._command(command, job.environment), None, b"", ceilings, limits)
        if compiled.ok:
            self._keep()
        return compiled

    def _keep(self) -> None:
        """Move what a compiler made to where programs can read but not write."""
        for name in os.listdir(self._place.box):
            source = os.path.join(self._place.box, name)
            descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    target = os.path.join(self._place.built, name)
                    with open(target, "wb") as copy:
                        while piece := file.read(1 << 20):
                            copy.write(piece)
                    os.chmod(target, 0o755)

    def _run_input(self, job: Job, given: Mapping[str, Any], left_s: float) -> Result:
        if left_s <= 0:
            return NEVER_BEGUN
        workspace.renew(self._place)
        limits = job.limits
        ceilings = Ceilings(
            seconds=min(limits.seconds, left_s),
            memory_mb=limits.memory_mb,
            disk_mb=limits.disk_mb,
            processes=limits.processes,
            limit_address_space=job.limit_address_space,
        )
        program = None
        if job.how == "exec":
            if not job.compilers:
                self._write_source(job.file, given["source"])
            request = self._command(job.command, job.environment)
        else:
            request = {"do": "fork", "how": job.how}
            program = {"source": given["source"], "call": given["call"]}
        return self._run(request, program, given["stdin"].encode("utf-8", "replace"), ceilings, limits)

    def _command(self, command: Sequence[str], extra: Mapping[str, str]) -> dict[str, Any]:
        box = self._place.box
        return {
            "do": "spawn",
            "words": [part.replace("{built}", self._place.built) for part in command],
            "environment": {**_ENVIRONMENT, "HOME": box, "TMPDIR": box, **extra},
        }

    def _write_source(self, name: str, source: str) -> None:
        path = os.path.join(self._place.box, name)
        with open(path, "w", encoding="utf-8", errors="replace") as file:
            file.write(source)
        os.chmod(path, 0o644)

    def _run(
        self,
        request: dict[str, Any],
        program: Mapping[str, Any] | None,
        stdin: bytes,
        ceilings: Ceilings,
        limits: Limits,
    ) -> Result:
        """Have it started, watch it, have everything ended that it started. `program`: what a fork runs."""
        files = [_as_file(self._place.built, stdin)]
        pipes = [os.pipe() for _ in range(3)]  # stdout, stderr, and whether it compiled
        files += [theirs for _, theirs in pipes]
        if program is not None:
            files.append(_as_file(self._place.built, protocol.encode(program)))
        begun = time.monotonic()
        self._link.send({**request, "ceilings": vars(ceilings)}, files)
        for file in files:
            os.close(file)
        _, (exited,) = self._link.receive()
        watch = Watch(self._host, [ours for ours, _ in pipes], ceilings, limits.output_kb << 10)
        watch.until_it_ends(exited, begun + ceilings.seconds)
        self._link.send({"do": "end"})
        ended, _ = self._link.receive()
        seconds = time.monotonic() - begun
        watch.drain()
        for ours, _ in pipes:
            os.close(ours)
        code = os.waitstatus_to_exitcode(ended["status"])
        return Result(
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            stdout=watch.texts[0].decode("utf-8", "replace"),
            stderr=watch.texts[1].decode("utf-8", "replace"),
            timed_out=watch.timed_out or code == -signal.SIGXCPU,
            too_much=watch.too_much,
            seconds=seconds,
            peak_memory_mb=max(ended["peak_kb"] / 1024, watch.most_memory / 2**20),
            compile_error=watch.texts[2] == b"!",
        )


def _as_file(folder: str, content: bytes) -> int:
    """A file without a name that holds what the program shall read."""
    if not content:
        return os.open(os.devnull, os.O_RDONLY)
    file = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    os.fchmod(file, 0o444)  # a program may open it once more, by /dev/stdin
    while content:
        content = content[os.write(file, content) :]
    os.lseek(file, 0, os.SEEK_SET)
    return file


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
