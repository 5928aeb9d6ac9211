"""The zygote: a warm process that forks programs and has nothing of any program in its memory.

A fork is a copy, and a program can read its own memory. So the zygote never sees a source, an input or an
output: the supervisor passes open files, the zygote forks, and the child reads its program itself. In a PID
namespace the zygote is PID 1, so that one `kill` ends whatever a program has started. Elsewhere it is the
subreaper, and it kills until no orphan is left.
"""

import _signal  # pyright: ignore[reportMissingImports]
import _socket  # pyright: ignore[reportMissingImports]
import contextlib
import gc
import json
import os
import signal
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from whetstone.sandbox import interpreters, restrict
from whetstone.sandbox.layers import SandboxEnv
from whetstone.sandbox.monitor import descendants
from whetstone.sandbox.program import Limits

IGNORED_BY_PYTHON = (int(signal.SIGPIPE), int(signal.SIGXFSZ))
_LONGEST = 1 << 16
_MAX_FILES = 8
_INT = struct.Struct("i")


class Link:
    """One end of the socket between a supervisor and its zygote: JSON, with open files."""

    def __init__(self, end: Any) -> None:
        self._end = end

    @classmethod
    def from_descriptor(cls, descriptor: int) -> "Link":
        return cls(_socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, descriptor))

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: Mapping[str, Any], files: Sequence[int] = ()) -> None:
        data = b"".join(map(_INT.pack, files))
        ancillary = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, data)] if files else []
        self._end.sendmsg([json.dumps(message).encode()], ancillary)

    def receive(self, timeout_s: float | None = None) -> tuple[dict[str, Any], list[int]]:
        """`EOFError` where the other side is gone, `TimeoutError` where it says nothing."""
        if timeout_s is not None:
            self._end.settimeout(timeout_s)
        data, ancillary, _, _ = self._end.recvmsg(_LONGEST, _socket.CMSG_SPACE(_MAX_FILES * _INT.size))
        if not data:
            raise EOFError("the other side is gone")
        files = [
            file
            for _, kind, content in ancillary
            if kind == _socket.SCM_RIGHTS
            for (file,) in _INT.iter_unpack(content[: len(content) // _INT.size * _INT.size])
        ]
        return json.loads(data), files

    def close(self) -> None:
        self._end.close()


def link_pair() -> tuple[Link, Link]:
    own_end, other_end = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    return Link(own_end), Link(other_end)


def serve(env: SandboxEnv, link: Link) -> None:
    """Start and end programs until the supervisor is gone. A request to start has the descriptors of
    stdin, stdout, stderr, of the pipe that tells whether it compiled and, for a fork, of the program itself.
    """
    gc.collect()
    gc.freeze()  # forks share what is there now
    gc.disable()
    child = 0
    try:
        while True:
            request, files = link.receive()
            if request["do"] == "end":
                status, child = kill_all(env, child), 0
                link.send({"status": status})
                continue
            child = _start(env, request, files)
            for file in files:
                os.close(file)
            exited = os.pidfd_open(child)
            link.send({}, [exited])
            os.close(exited)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        if child:
            kill_all(env, child)


def _start(env: SandboxEnv, request: Mapping[str, Any], files: list[int]) -> int:
    limits = Limits(**request["limits"])
    if request["do"] == "spawn" and env.spawn_helper is not None:
        return _spawn(env, env.spawn_helper, request, files, limits)
    child = os.fork()
    if child == 0:
        _child_main(env, request, files, limits)
    return child


def _spawn(
    env: SandboxEnv, spawn_helper: str, request: Mapping[str, Any], files: list[int], limits: Limits
) -> int:
    """By `spawn_helper.c`, which does what `_child_main` does: a fork costs more than most programs."""
    rlimits = restrict.limits_of(env.restrictions, limits)
    user = -1 if env.restrictions.user is None else env.restrictions.user
    first = [spawn_helper, env.work_dir, str(user), str(len(rlimits))]
    numbers = [str(number) for limit, values in rlimits.items() for number in (int(limit), *values)]
    streams = [(os.POSIX_SPAWN_DUP2, file, target) for target, file in enumerate(files[:3])]
    return os.posix_spawn(
        spawn_helper,
        [*first, *numbers, *request["argv"]],
        request["environment"],
        file_actions=streams,
        setsigdef=IGNORED_BY_PYTHON,
    )


def _child_main(env: SandboxEnv, request: Mapping[str, Any], files: list[int], limits: Limits) -> NoReturn:
    try:
        os.setsid()
        compile_pipe = os.dup2(files[3], 200, inheritable=False)
        program = os.dup2(files[4], 201, inheritable=False) if len(files) > 4 else None
        for target, file in enumerate(files[:3]):
            os.dup2(file, target)
        os.closerange(3, compile_pipe)
        os.closerange(202, 4096)
        os.chdir(env.work_dir)
        restrict.apply(env.restrictions, limits)
        gc.enable()
        if program is None:
            for number in IGNORED_BY_PYTHON:
                _signal.signal(number, 0)  # the default; `signal.signal` takes longer, for its named numbers
            os.execve(request["argv"][0], request["argv"], request["environment"])
        else:
            _run_program(request["runner"], program, compile_pipe)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(2, f"sandbox: {error}\n".encode())
    os._exit(127)


def _run_program(runner: str, file: int, compile_pipe: int) -> None:
    content = os.pread(file, os.fstat(file).st_size, 0)
    os.close(file)
    program = json.loads(content)
    del content

    def report(failed: bool) -> None:
        if failed:
            os.write(compile_pipe, b"!")
        os.close(compile_pipe)

    interpreters.run(runner, program["source"], program["call"], report)


def kill_all(env: SandboxEnv, child: int) -> int:
    """Kill what is left, until there is nothing; the child's own status."""
    child_status: int | None = None
    deadline = time.monotonic() + 5
    all_killed = False
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG if not all_killed else 0)
        except ChildProcessError:
            break
        if process == child:
            child_status = status
        if process:
            continue
        _kill(env)
        all_killed = env.restrictions.has_pid_namespace  # one call gets them all; then it is enough to wait
        if not all_killed:
            time.sleep(0.001)
            if time.monotonic() > deadline:
                raise OSError(16, "processes that can't be ended")  # the pool replaces us
    assert child_status is not None
    return child_status


def _kill(env: SandboxEnv) -> None:
    if env.restrictions.has_pid_namespace:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        return
    # Nobody else has this user: kill(-1) as that user reaches all its processes at once.
    if env.restrictions.user is not None:
        helper = os.fork()
        if helper == 0:
            try:
                os.setresuid(env.restrictions.user, env.restrictions.user, env.restrictions.user)
                os.kill(-1, signal.SIGKILL)
            finally:
                os._exit(0)
        return
    for process in descendants(env, os.getpid()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
