"""The process that environments are forked from: it imports them once, so that episodes start at once.

Each episode is a fork with a socket of its own and limits on its memory. One that hangs, crashes or exits
costs nobody else anything. The host itself never calls an environment. Where episodes have ended it forks
spares for those to come, while nobody waits: a fork and its limits take longer than most resets.
"""

import contextlib
import gc
import os
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from whetstone.config.plugins import describe_error
from whetstone.environments.adapter import close, open_episode, seed_generators, snapshot
from whetstone.environments.messages import BadMessage, pack, unpack
from whetstone.environments.orphans import Orphans, adopt_orphans, kill_group
from whetstone.environments.table import factory_of
from whetstone.environments.toolbox import load_tool, make_tools
from whetstone.errors import UserError
from whetstone.sandbox.service import use_service

SPARE_PAUSE_S = 0.005  # without a request, before another spare is forked
MAX_SPARES = 512  # with the episodes that run


def serve(connection: Connection) -> None:
    """Fork and end episodes until the run is gone."""
    settings = connection.recv()
    use_service(settings["sandbox"])
    try:
        factories = {spec: factory_of(spec) for spec in settings["environments"]}
        tools = [load_tool(spec) for spec in settings["tools"]]
    except UserError as error:
        return connection.send({"error": str(error)})
    gc.collect()
    gc.freeze()  # forks share what is there now
    connection.send({"ready": True})
    # The address space of this process, of which its forks have as much.
    own_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    loaded = Loaded(
        factories=factories,
        tools=tools,
        tool_settings=settings["tool_settings"],
        memory_bytes=own_bytes + settings["memory_bytes"],
        with_state=settings["with_state"],
    )
    with tempfile.TemporaryDirectory(prefix="whet-episodes-", ignore_cleanup_errors=True) as folder:
        adopt_orphans()
        host = Host(connection, loaded, folder)
        try:
            host.serve()
        finally:
            host.end_all()


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What every episode of a run is forked with."""

    factories: Mapping[str, Callable[..., Any]]
    tools: Sequence[Callable[..., Any]]
    tool_settings: Mapping[str, Any]
    memory_bytes: int  # of the whole process
    with_state: bool


class Host:
    def __init__(self, connection: Connection, loaded: Loaded, folder: str) -> None:
        self.connection, self.loaded, self.folder = connection, loaded, folder
        self.children: dict[int, int] = {}  # number of an episode -> process
        self.spares: dict[int, Connection] = {}  # process -> where it is told its episode
        self.most = 0  # episodes at once so far
        self.orphans = Orphans()

    def serve(self) -> None:
        while True:
            self._prepare()
            request = self.connection.recv()  # EOFError: the run is gone
            self._reap()
            if request["do"] == "close":
                return
            if request["do"] == "end":
                if (child := self.children.pop(request["number"], None)) is not None:
                    self._kill(child)
                continue
            handle = reduction.recv_handle(self.connection)
            self.children[request["number"]] = self._start(request, handle)
            os.close(handle)
            self.most = max(self.most, len(self.children))

    def end_all(self) -> None:
        for child in [*self.children.values(), *self.spares]:
            self._kill(child)
        self.orphans.end_all(())

    def _prepare(self) -> None:
        """Until a request comes: look for orphans, and fork spares for episodes that have ended."""
        while True:
            pause_s = self.orphans.pause_s  # 0: they have waited for long
            is_short = len(self.children) + len(self.spares) < min(self.most, MAX_SPARES) and pause_s != 0
            if pause_s is None and not is_short:
                return
            if self.connection.poll(SPARE_PAUSE_S if is_short else pause_s):
                return
            self._reap()
            if is_short:
                self._fork_spare()
            else:
                self.orphans.end_all({*self.children.values(), *self.spares})

    def _start(self, request: Mapping[str, Any], handle: int) -> int:
        """The process of an episode: a spare, or a new fork."""
        while self.spares:
            child, link = self.spares.popitem()
            with link:
                try:
                    link.send(request)
                    reduction.send_handle(link, handle, child)
                    return child
                except OSError:  # it has ended
                    self._kill(child)
        child = os.fork()
        if child == 0:
            self._leave()
            _serve_episode(self.loaded, self.folder, lambda: (request, handle))
        return child

    def _fork_spare(self) -> None:
        ours, theirs = Pipe()
        child = os.fork()
        if child == 0:
            ours.close()
            self._leave()
            _serve_episode(self.loaded, self.folder, lambda: _await_episode(theirs))
        theirs.close()
        self.spares[child] = ours

    def _leave(self) -> None:
        """In a fork: no episode may reach the host, or other episodes."""
        self.connection.close()
        for link in self.spares.values():
            link.close()

    def _reap(self) -> None:
        """Forget episodes that have ended by themselves, and end what they have left behind."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                if (link := self.spares.pop(ended, None)) is not None:
                    link.close()
                    self._kill(ended)
                for number, child in list(self.children.items()):
                    if child == ended:
                        del self.children[number]
                        self._kill(child)

    def _kill(self, child: int) -> None:
        """End an episode with its group, and remove its files; who left the group is ended later."""
        kill_group(child)
        shutil.rmtree(os.path.join(self.folder, str(child)), ignore_errors=True)
        self.orphans.expect(child)


def _serve_episode(
    loaded: Loaded, folder: str, receive: Callable[[], tuple[Mapping[str, Any], int]]
) -> NoReturn:
    """Set up, then answer the run's messages about the episode that is received; never returns."""
    try:
        _set_up(loaded, folder)
        request, handle = receive()
        with socket.socket(fileno=handle) as link:
            _answer_all(link, loaded, request)
    except BaseException:  # the run sees the socket close; of a spare, EOFError: the host is gone
        os._exit(1)
    os._exit(0)


def _await_episode(link: Connection) -> tuple[Mapping[str, Any], int]:
    with link:
        return link.recv(), reduction.recv_handle(link)


def _set_up(loaded: Loaded, folder: str) -> None:
    """A group, a folder for temporary files and limits of its own."""
    os.setsid()
    adopt_orphans()
    gc.enable()
    tempfile.tempdir = os.environ["TMPDIR"] = os.path.join(folder, str(os.getpid()))
    os.mkdir(tempfile.tempdir)
    resource.setrlimit(resource.RLIMIT_AS, (loaded.memory_bytes, loaded.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _answer_all(link: socket.socket, loaded: Loaded, request: Mapping[str, Any]) -> None:
    episode, received = None, bytearray()
    while True:
        message = unpack(received)
        if message is None:
            piece = link.recv(1 << 16)
            if not piece:
                return
            received += piece
            continue
        started = time.monotonic()
        try:
            if message["do"] == "reset":
                seed_generators(message["seed"])
                factory = loaded.factories[request["environment"]]
                tools = make_tools(loaded.tools, loaded.tool_settings)
                episode = open_episode(factory, request["settings"], tools)
                answer = episode.reset(message["seed"], message["row"])
            elif episode is None:
                raise BadMessage("an episode begins with reset")
            elif message["do"] == "step":
                answer = episode.step(message["text"], message["calls"])
            else:
                answer = episode.finish()
                if loaded.with_state:
                    answer["state"] = snapshot(episode.environment)
                close(episode.environment)
        except MemoryError:
            answer = {"error": "out of memory (environment_memory_mb)"}
        except Exception as error:
            answer = {"error": describe_error(error)}
        link.sendall(pack({**answer, "seconds": time.monotonic() - started}))
