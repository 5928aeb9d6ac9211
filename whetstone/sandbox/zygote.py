"""The process that programs are forked from: warm, and without anything of any program in its memory.

A fork is a copy, and a program can read its own memory. So this process never sees a source text, an input or
an output: the keeper hands it open files, it forks, and the child reads its program itself. In a process
namespace it is number 1, so that a single call ends whatever a program has started; elsewhere orphans come to
it, and it kills until there is none.
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
from whetstone.sandbox.layers import Place
from whetstone.sandbox.monitor import descendants
from whetstone.sandbox.restrict import Ceilings

IGNORED_BY_PYTHON = (int(signal.SIGPIPE), int(signal.SIGXFSZ))
_LONGEST = 1 << 16
_MOST_FILES = 8
_INT = struct.Struct("i")


class Link:
    """One end of the line between a keeper and its zygote: JSON, with open files."""

    def __init__(self, end: Any) -> None:
        self._end = end

    def send(self, message: Mapping[str, Any], files: Sequence[int] = ()) -> None:
        data = b"".join(map(_INT.pack, files))
        ancillary = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, data)] if files else []
        self._end.sendmsg([json.dumps(message).encode()], ancillary)

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """`EOFError` where the other side is gone."""
        data, ancillary, _, _ = self._end.recvmsg(_LONGEST, _socket.CMSG_SPACE(_MOST_FILES * _INT.size))
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


def pair() -> tuple[Link, Link]:
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    return Link(ours), Link(theirs)


def serve(place: Place, link: Link) -> None:
    """Start and end programs until the keeper is gone. A request to start brings the descriptors of stdin,
    stdout, stderr, of the pipe that tells whether it compiled and, for a fork, of the program itself.
    """
    gc.collect()
    gc.freeze()  # forks share what is there now
    gc.disable()
    child = 0
    try:
        while True:
            request, files = link.receive()
            if request["do"] == "end":
                status, peak_kb = end_all(place, child)
                child = 0
                link.send({"status": status, "peak_kb": peak_kb})
                continue
            child = _start(place, request, files)
            for file in files:
                os.close(file)
            exited = os.pidfd_open(child)
            link.send({}, [exited])
            os.close(exited)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        if child:
            end_all(place, child)


def _start(place: Place, request: Mapping[str, Any], files: list[int]) -> int:
    ceilings = Ceilings(**request["ceilings"])
    if request["do"] == "spawn" and place.starter is not None:
        return _spawn(place, place.starter, request, files, ceilings)
    child = os.fork()
    if child == 0:
        _be_the_child(place, request, files, ceilings)
    return child


def _spawn(
    place: Place, starter: str, request: Mapping[str, Any], files: list[int], ceilings: Ceilings
) -> int:
    """In a process that has nothing of this one: `spawn_helper.c` does what `_be_the_child` would do. Copying
    this process and giving the copy up again costs more than most programs take.
    """
    limits = restrict.limits_of(place.walls, ceilings)
    user = -1 if place.walls.user is None else place.walls.user
    first = [starter, place.box, str(user), str(len(limits))]
    numbers = [str(number) for which, ends in limits.items() for number in (int(which), *ends)]
    streams = [(os.POSIX_SPAWN_DUP2, file, target) for target, file in enumerate(files[:3])]
    return os.posix_spawn(
        starter,
        [*first, *numbers, *request["words"]],
        request["environment"],
        file_actions=streams,
        setsigdef=IGNORED_BY_PYTHON,
    )


def _be_the_child(place: Place, request: Mapping[str, Any], files: list[int], ceilings: Ceilings) -> NoReturn:
    try:
        os.setsid()
        told = os.dup2(files[3], 200, inheritable=False)
        program = os.dup2(files[4], 201, inheritable=False) if len(files) > 4 else None
        for target, file in enumerate(files[:3]):
            os.dup2(file, target)
        os.closerange(3, told)
        os.closerange(202, 4096)
        os.chdir(place.box)
        restrict.close_in(place.walls, ceilings)
        gc.enable()
        if program is None:
            _become(request["words"], request["environment"])
        else:
            _run_program(request["how"], program, told)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(2, f"sandbox: {error}\n".encode())
    os._exit(127)


def _run_program(how: str, file: int, told: int) -> None:
    content = os.pread(file, os.fstat(file).st_size, 0)
    os.close(file)
    given = json.loads(content)
    del content

    def tell(failed: bool) -> None:
        if failed:
            os.write(told, b"!")
        os.close(told)

    interpreters.run(how, given["source"], given["call"], tell)


def _become(words: list[str], environment: Mapping[str, str]) -> None:
    for number in IGNORED_BY_PYTHON:
        _signal.signal(number, 0)  # the default; `signal.signal` takes longer, for its named numbers
    os.execve(words[0], words, environment)


def end_all(place: Place, child: int) -> tuple[int, int]:
    """Kill what is left, until there is nothing; the child's own status, and its peak memory in KiB."""
    own: tuple[int, int] | None = None
    patience = time.monotonic() + 5
    ended = False
    while True:
        try:
            process, status, usage = os.wait4(-1, os.WNOHANG if not ended else 0)
        except ChildProcessError:
            break
        if process == child:
            own = (status, usage.ru_maxrss)
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
    for process in descendants(place, os.getpid()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
