"""The supervisor process of a pool: writes a program's files, monitors it and reads its output.

The zygote, another process behind the sandbox's layers, starts the programs and has nothing of any program in
its memory. Neither ever sees an expected value. A supervisor carries nothing from one program to the next.
"""

import contextlib
import os
import resource
import signal
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NoReturn

from whetstone.sandbox import interpreters, protocol, syscalls, workspace, zygote
from whetstone.sandbox.layers import SandboxEnv, enter_sandbox
from whetstone.sandbox.monitor import Monitor, PoolClosed
from whetstone.sandbox.program import NOT_STARTED, Job, Limits, Result, job_from
from whetstone.sandbox.restrict import Restrictions
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
    own_end, other_end = zygote.link_pair()
    main_pid = os.getpid()

    def run_supervisor(child: int) -> NoReturn:
        other_end.close()
        _supervise(channel, own_end, child, settings)

    try:
        # Before the layers: it reads files that are out of reach behind them.
        interpreters.preload(settings["runner"])
        env = enter_sandbox(settings, run_supervisor)
    except OSError as error:
        if os.getpid() == main_pid:
            protocol.send(channel, {"refused": str(error)})
        else:
            other_end.send({"refused": str(error)})
        return
    os.close(channel)
    own_end.close()
    other_end.send({"env": asdict(env)})
    zygote.serve(env, other_end)


def _supervise(channel: int, link: Link, child: int, settings: dict[str, Any]) -> NoReturn:
    """Serve jobs until the pool or the zygote ends."""
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)  # a program of the same user can't look into us
    try:
        answer, _ = link.receive()
        if "refused" in answer:
            protocol.send(channel, answer)
        else:
            restrictions = Restrictions(**answer["env"].pop("restrictions"))
            env = SandboxEnv(**answer["env"], restrictions=restrictions)
            supervisor = Supervisor(env, 1 if restrictions.has_pid_namespace else child, channel, link)
            protocol.send(channel, {"ready": env.layers})  # a run that failed meanwhile has hung up
            while True:
                protocol.send(channel, supervisor.serve(job_from(protocol.receive(channel))))
    except (EOFError, BrokenPipeError, ConnectionResetError, PoolClosed):
        pass
    link.close()  # the zygote ends what runs, and itself
    os.waitpid(child, 0)
    if settings["folder"]:
        import shutil

        shutil.rmtree(settings["folder"], ignore_errors=True)
    os._exit(0)


class Supervisor:
    def __init__(self, env: SandboxEnv, zygote: int, channel: int, link: Link) -> None:
        self._env, self._zygote, self._channel, self._link = env, zygote, channel, link

    def serve(self, job: Job) -> dict[str, Any]:
        """Compile once, run every input; the next compiler has a try where the first fails or is too slow."""
        started_at = time.monotonic()
        remaining = lambda: job.limits.total_seconds - (time.monotonic() - started_at)  # noqa: E731
        results: list[Result] = []
        for compiler in job.compilers or (None,):
            if compiler is not None:
                compiled = self._compile(job, compiler, remaining())
                if not compiled.ok:
                    results = results or [replace(compiled, compile_error=True, stdout="")] * len(job.inputs)
                    continue
            results = [self._run_input(job, run_input, remaining()) for run_input in job.inputs]
            if not any(result.timed_out for result in results):
                break
        workspace.clear(self._env)
        if job.compilers:
            workspace.empty(self._env.build_dir)
        return {"results": [vars(result) for result in results]}

    def _compile(self, job: Job, command: Sequence[str], remaining_s: float) -> Result:
        workspace.renew(self._env)
        workspace.empty(self._env.build_dir)
        self._write_source(job.file, job.inputs[0]["source"])
        limits = replace(
            job.limits,
            seconds=min(job.limits.compile_seconds, max(0.1, remaining_s)),
            memory_mb=job.limits.compile_memory_mb,
            processes=max(64, job.limits.processes),
            limit_address_space=False,  # compilers reserve much; the monitor looks at what they use
        )
        compiled = self._run(self._command(command, job.environment), None, b"", limits)
        if compiled.ok:
            self._save_build()
        return compiled

    def _save_build(self) -> None:
        """Move what a compiler made to where programs can read but not write."""
        for name in os.listdir(self._env.work_dir):
            source = os.path.join(self._env.work_dir, name)
            descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    target = os.path.join(self._env.build_dir, name)
                    with open(target, "wb") as copy:
                        while piece := file.read(1 << 20):
                            copy.write(piece)
                    os.chmod(target, 0o755)

    def _run_input(self, job: Job, run_input: Mapping[str, Any], remaining_s: float) -> Result:
        if remaining_s <= 0:
            return NOT_STARTED
        workspace.renew(self._env)
        limits = replace(job.limits, seconds=min(job.limits.seconds, remaining_s))
        program = None
        if job.runner == "exec":
            if not job.compilers:
                self._write_source(job.file, run_input["source"])
            request = self._command(job.command, job.environment)
        else:
            request = {"do": "fork", "runner": job.runner}
            program = {"source": run_input["source"], "call": run_input["call"]}
        return self._run(request, program, run_input["stdin"].encode("utf-8", "replace"), limits)

    def _command(self, command: Sequence[str], extra: Mapping[str, str]) -> dict[str, Any]:
        work_dir = self._env.work_dir
        return {
            "do": "spawn",
            "argv": [part.replace("{build_dir}", self._env.build_dir) for part in command],
            "environment": {**_ENVIRONMENT, "HOME": work_dir, "TMPDIR": work_dir, **extra},
        }

    def _write_source(self, name: str, source: str) -> None:
        path = os.path.join(self._env.work_dir, name)
        with open(path, "w", encoding="utf-8", errors="replace") as file:
            file.write(source)
        os.chmod(path, 0o644)

    def _run(
        self, request: dict[str, Any], program: Mapping[str, Any] | None, stdin: bytes, limits: Limits
    ) -> Result:
        """Have it started, watch it, have everything ended that it started. `program`: what a fork runs."""
        files = [_anonymous_file(self._env.build_dir, stdin)]
        pipes = [os.pipe() for _ in range(3)]  # stdout, stderr, and whether it compiled
        files += [other_end for _, other_end in pipes]
        if program is not None:
            files.append(_anonymous_file(self._env.build_dir, protocol.encode(program)))
        started_at = time.monotonic()
        self._link.send({**request, "limits": vars(limits)}, files)
        for file in files:
            os.close(file)
        _, (exited,) = self._link.receive()
        monitor = Monitor(self._env, self._zygote, self._channel, [end for end, _ in pipes], limits)
        monitor.wait_for_exit(exited, started_at + limits.seconds)
        self._link.send({"do": "end"})
        ended, _ = self._link.receive()
        seconds = time.monotonic() - started_at
        monitor.drain()
        for own_end, _ in pipes:
            os.close(own_end)
        code = os.waitstatus_to_exitcode(ended["status"])
        return Result(
            exit_code=code if code >= 0 else None,
            stdout=monitor.outputs[0].decode("utf-8", "replace"),
            stderr=monitor.outputs[1].decode("utf-8", "replace"),
            timed_out=monitor.timed_out or code == -signal.SIGXCPU,
            exceeded_limit=monitor.exceeded_limit,
            seconds=seconds,
            compile_error=monitor.outputs[2] == b"!",
        )


def _anonymous_file(folder: str, content: bytes) -> int:
    """A file without a name that holds what the program shall read."""
    if not content:
        return os.open(os.devnull, os.O_RDONLY)
    file = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    os.fchmod(file, 0o444)  # a program may open it once more, by /dev/stdin
    protocol.write_all(file, content)
    os.lseek(file, 0, os.SEEK_SET)
    return file


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
