"""A process whose supervisors many processes share, one call at a time: an episode that runs a few programs
need not start a supervisor of its own, which takes ten times as long as a program.

A supervisor carries nothing from one program to the next, so who had it before does not matter. A call takes
a free one or starts another, up to a few for each core; one that has waited starts another in any case, since
programs that sleep use no core.
"""

import contextlib
import os
import select
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from whetstone.errors import UserError
from whetstone.sandbox import cgroup, protocol
from whetstone.sandbox.pool import LocalPool, Pool, run_program
from whetstone.sandbox.program import Limits, Outcome, Program
from whetstone.sandbox.worker_process import WorkerProcess, allow_open_files, available_cores

PATIENCE_S = 2.0  # without a free supervisor, before another one is started
_START_S = 60.0
_CLOSE_S = 10.0
_address: str | None = None  # of the service that this process uses


class SandboxService:
    """Our side of the process. It ends with us."""

    def __init__(self, isolation: str) -> None:
        self._worker = WorkerProcess("whetstone.sandbox.service:serve", keep_environment=False)
        self._worker.connection.send(isolation)
        try:
            if not self._worker.connection.poll(_START_S):
                raise EOFError
            self.address: str = self._worker.connection.recv()
        except EOFError:
            self._worker.close()
            raise UserError("The process of the sandbox did not start: see its message above.") from None

    def close(self) -> None:
        """End it with its supervisors. May be called twice."""
        with contextlib.suppress(OSError, EOFError):
            self._worker.connection.send("close")
            self._worker.connection.poll(_CLOSE_S)
        self._worker.close()
        shutil.rmtree(os.path.dirname(self.address), ignore_errors=True)  # what is left if it was killed
        cgroup.remove_of({self._worker.process.pid})


def use_service(address: str | None) -> None:
    """From now on, `open_pool` in this process and its forks gives pools of this service."""
    global _address
    _address = address


def open_pool(isolation: str) -> Pool:
    """A pool for the process that asks: of the service it uses, otherwise its own."""
    return LocalPool(isolation=isolation) if _address is None else ServicePool(_address)


class ServicePool:
    """Runs programs, one at a time, on supervisors of a service."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._socket: socket.socket | None = None
        self._statement: str | None = None

    def run(self, program: Program, limits: Limits) -> Outcome:
        return run_program(self._request, program, limits)

    def start(self, language: str) -> None:
        self._statement = self._request(language, None, _START_S)["statement"]

    @property
    def statement(self) -> str:
        assert self._statement is not None, "start a language first"
        return self._statement

    def close(self) -> None:
        """May be called twice."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _request(self, language: str, job: dict[str, Any] | None, patience_s: float) -> dict[str, Any]:
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX)
                self._socket.connect(self._address)
            request = {"language": language, "job": job, "patience_s": patience_s}
            protocol.send(self._socket.fileno(), request)
            # It may have to wait for a supervisor, or for one that starts.
            if not select.select([self._socket], [], [], patience_s + PATIENCE_S + _START_S)[0]:
                raise TimeoutError
            answer = protocol.receive(self._socket.fileno())
        except (EOFError, OSError):  # TimeoutError is an OSError
            self.close()
            raise
        if "refused" in answer:
            raise UserError(answer["refused"])
        return answer


# --- in the process ---


def serve(connection: Connection) -> None:
    """Until the run asks for the end, or is gone."""
    allow_open_files()  # one for each process that uses it
    supervisors = _Supervisors(connection.recv(), most=max(4, 2 * available_cores()))
    folder = tempfile.mkdtemp(prefix="whet-sandbox-")  # short: it has none of our variables, TMPDIR included
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address := os.path.join(folder, "s"))
            listener.listen(1024)
            threading.Thread(target=_accept, args=(listener, supervisors), daemon=True).start()
            connection.send(address)
            with contextlib.suppress(EOFError, OSError):
                connection.recv()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        supervisors.close()
    with contextlib.suppress(OSError):
        connection.send("closed")


def _accept(listener: socket.socket, supervisors: "_Supervisors") -> None:
    with contextlib.suppress(OSError):  # it was closed
        while True:
            link, _ = listener.accept()
            threading.Thread(target=_answer_all, args=(link, supervisors), daemon=True).start()


def _answer_all(link: socket.socket, supervisors: "_Supervisors") -> None:
    """The calls of one process."""
    with link, contextlib.suppress(EOFError, OSError):
        while True:
            request = protocol.receive(link.fileno())
            with supervisors.borrow() as pool:
                answer = _answer(pool, request)
            protocol.send(link.fileno(), answer)


def _answer(pool: LocalPool, request: dict[str, Any]) -> dict[str, Any]:
    language, job = request["language"], request["job"]
    try:
        if job is None:
            pool.start(language)
            return {"statement": pool.statement}
        return pool.request(language, job, request["patience_s"])
    except UserError as error:
        return {"refused": str(error)}


class _Supervisors:
    """Pools that are free, and how many there are in all."""

    def __init__(self, isolation: str, most: int) -> None:
        self._isolation, self._most = isolation, most
        self._pools: set[LocalPool] = set()
        self._free: list[LocalPool] = []
        self._changed = threading.Condition()
        self._is_closed = False

    @contextlib.contextmanager
    def borrow(self) -> Iterator[LocalPool]:
        pool = self._take()
        try:
            yield pool
        finally:
            self._return(pool)

    def _take(self) -> LocalPool:
        with self._changed:
            self._changed.wait_for(lambda: self._free or len(self._pools) < self._most, PATIENCE_S)
            if self._is_closed:
                raise EOFError
            if self._free:
                return self._free.pop()  # the last one: its pages are in the caches
            pool = LocalPool(isolation=self._isolation)
            self._pools.add(pool)
            return pool

    def _return(self, pool: LocalPool) -> None:
        with self._changed:
            if len(self._pools) <= self._most and not self._is_closed:
                self._free.append(pool)
                self._changed.notify()
                return
        pool.close()
        with self._changed:
            self._pools.discard(pool)
            self._changed.notify_all()

    def close(self) -> None:
        """Programs that run are broken off; their threads return the pools, which ends them."""
        with self._changed:
            self._is_closed = True
            free, self._free = self._free, []
            self._pools.difference_update(free)
            for pool in self._pools:
                pool.hang_up()
        for pool in free:
            pool.close()
        with self._changed:
            self._changed.wait_for(lambda: not self._pools, _CLOSE_S / 2)
