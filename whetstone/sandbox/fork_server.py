"""Forks scoring workers from a process that has imported what they need: milliseconds instead of a second for
each worker, and for each one that replaces another.

A worker can read its own memory, and it starts as a copy of the server's. So the server of isolated workers
has none of our environment variables, and no server reads a configuration, a text or a file of the user's: a
worker gets these through its own pipe, after the fork. There is one server for each target. It ends with the
process that uses it, or when it has had no worker for a minute.
"""

import contextlib
import functools
import gc
import importlib
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn

from whetstone.sandbox.worker_process import WorkerProcess, environment_of, run_target
from whetstone.sandbox.zygote import Link, link_pair

IDLE_S = 60.0
REPLY_LIMIT_S = 30.0  # a server that says nothing for so long is stopped, and ended
_UNKNOWN_EXIT = -int(signal.SIGKILL)  # of a worker whose server was killed: nobody could wait for it
_servers: dict[tuple[str, bool], "ForkServer"] = {}  # by target, and whether it has our environment
_lock = threading.Lock()


@functools.cache
def is_supported() -> bool:
    """Whether this system has what it takes: Linux 5.3, and no filter that forbids it."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


class ForkServer:
    """Our side of a server. Each request has a socket of its own for the reply, so none can get another's."""

    def __init__(self, target: str, *, keep_environment: bool) -> None:
        self._link, other_end = link_pair()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, target, str(other_end.fileno())],
            pass_fds=[other_end.fileno()],
            env=environment_of(keep=keep_environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            process_group=0,
        )
        other_end.close()
        self._has_ended = False
        self.close = weakref.finalize(self, _close, self._link, self._process)

    def is_running(self) -> bool:
        return not self._has_ended and self._process.poll() is None

    def ask(self, request: dict[str, Any], files: Sequence[int] = ()) -> Link:
        """Send a request; the socket on which its reply will come."""
        reply, other_end = link_pair()
        try:
            self._link.send(request, [other_end.fileno(), *files])
        except OSError:  # the reply will end, too
            self._has_ended = True
        other_end.close()
        return reply

    def receive(self, reply: Link) -> tuple[dict[str, Any], list[int]]:
        """The reply to a request; `EOFError` or `OSError` where there is none."""
        try:
            return reply.receive(REPLY_LIMIT_S)
        except TimeoutError:
            self._has_ended = True
            self._process.kill()
            self._process.wait()
            raise

    def leave(self) -> None:
        """In a fork of ours: the server must not wait for it."""
        self._link.close()


def _close(link: Link, process: subprocess.Popen[bytes]) -> None:
    link.close()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _server(target: str, keep_environment: bool) -> ForkServer:
    with _lock:
        server = _servers.get((target, keep_environment))
        if server is None or not server.is_running():
            server = ForkServer(target, keep_environment=keep_environment)
            _servers[target, keep_environment] = server
        return server


_inherited: list[ForkServer] = []  # kept: their finalizers would wait for a process that is not ours


def _leave_servers() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have had it
    for server in _servers.values():
        server.close.detach()
        server.leave()
    _inherited.extend(_servers.values())
    _servers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_servers)


class ForkedProcess:
    """A process that the server has forked, as `subprocess.Popen` would show it. It may not be there yet."""

    def __init__(self, server: ForkServer, reply: Link) -> None:
        self._server, self._reply = server, reply
        self._pid = 0
        self._exited = -1  # a descriptor that can be read once the process has ended
        self.returncode: int | None = None

    @property
    def pid(self) -> int:
        """Waits until it is there; `ProcessLookupError` where the server has ended before."""
        if not self._pid:
            try:
                message, files = self._server.receive(self._reply)
            except (EOFError, OSError):
                raise ProcessLookupError("the server of this process has ended") from None
            self._pid, (self._exited,) = message["process"], files
            self._reply.close()
        return self._pid

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is not None:
            return self.returncode
        self.returncode = self._wait(timeout)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        try:
            pid = self.pid
        except ProcessLookupError:
            return _UNKNOWN_EXIT
        poll = select.poll()
        poll.register(self._exited, select.POLLIN)
        if not poll.poll(None if timeout is None else 1000 * timeout):
            raise subprocess.TimeoutExpired("a forked worker", timeout or 0.0)
        os.close(self._exited)
        reply = self._server.ask({"do": "wait", "process": pid})
        try:
            return self._server.receive(reply)[0]["code"]
        except (EOFError, OSError):
            return _UNKNOWN_EXIT
        finally:
            reply.close()


class ForkedWorker(WorkerProcess):
    """Runs `module:function(connection)` in a fork of a server that has imported `modules`, too."""

    def __init__(self, target: str, modules: Sequence[str] = (), *, keep_environment: bool = False) -> None:
        self.connection, worker_end = Pipe()
        request: dict[str, Any] = {"do": "start", "modules": list(modules), "keep": keep_environment}
        request["path"] = [os.path.abspath(entry) for entry in sys.path]
        with contextlib.ExitStack() as stack:
            files = [worker_end.fileno()]
            for path, descriptor in ((os.curdir, None), (os.devnull, 1), (os.devnull, 2)):
                files.append(_duplicate(path, descriptor))
                stack.callback(os.close, files[-1])
            server = _server(target, keep_environment)
            self.process = ForkedProcess(server, server.ask(request, files))
        worker_end.close()
        if keep_environment:  # as it is now: the server has that of its own start
            with contextlib.suppress(OSError):  # the server has ended, which is seen when it is read
                self.connection.send(environment_of(keep=True))


def _duplicate(path: str, descriptor: int | None) -> int:
    """A copy of one of our streams, or the file at `path` where there is none."""
    with contextlib.suppress(OSError):
        if descriptor is not None:
            return os.dup(descriptor)
    return os.open(path, os.O_RDONLY if descriptor is None else os.O_WRONLY)


def serve(target: str, link: Link) -> None:
    """Fork workers until the other side is gone; they end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks handles Ctrl-C
    importlib.import_module(target.split(":")[0])
    gc.freeze()  # forks share what is there now
    workers: set[int] = set()
    poll = select.poll()
    poll.register(link.fileno(), select.POLLIN)
    with contextlib.suppress(EOFError, ConnectionResetError):
        while poll.poll(None if workers else 1000 * IDLE_S):
            request, (reply_end, *files) = link.receive()
            reply = Link.from_descriptor(reply_end)
            if request["do"] == "start":
                worker = _fork(target, request, files, link, reply)
                workers.add(worker)
                exited = os.pidfd_open(worker)
                _reply(reply, {"process": worker}, [exited])
                for file in (exited, *files):
                    os.close(file)
            else:
                workers.discard(request["process"])
                _, status = os.waitpid(request["process"], 0)
                _reply(reply, {"code": os.waitstatus_to_exitcode(status)})
            reply.close()
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker, signal.SIGKILL)


def _reply(link: Link, message: dict[str, Any], files: Sequence[int] = ()) -> None:
    with contextlib.suppress(OSError):  # nobody waits for it any more
        link.send(message, files)


def _fork(target: str, request: dict[str, Any], files: list[int], link: Link, reply: Link) -> int:
    for name in request["modules"]:
        if name not in sys.modules:
            with contextlib.suppress(Exception):  # the worker imports it again, and tells what is wrong
                importlib.import_module(name)
                gc.freeze()
    worker = os.fork()
    if worker == 0:
        link.close()
        reply.close()
        _run(target, request, *files)
    with contextlib.suppress(OSError):  # it was quicker
        os.setpgid(worker, worker)
    return worker


def _run(target: str, request: dict[str, Any], pipe: int, folder: int, stdout: int, stderr: int) -> NoReturn:
    code = 1
    try:
        with contextlib.suppress(OSError):  # the server was quicker
            os.setpgid(0, 0)
        os.fchdir(folder)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        for file in (folder, stdout, stderr):
            os.close(file)
        sys.path[:] = list(dict.fromkeys([*request["path"], *sys.path]))
        connection = Connection(pipe)
        if request["keep"]:
            variables = connection.recv()
            os.environ.clear()
            os.environ.update(variables)
        run_target(target, connection)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1], Link.from_descriptor(int(sys.argv[2])))
    os._exit(0)  # at once: who asks meanwhile would get no answer
