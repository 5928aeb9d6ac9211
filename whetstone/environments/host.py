"""The process that environments are forked from: it imports them once, so that episodes start at once.

Each episode is a fork with a socket of its own and limits on its memory. One that hangs, crashes or exits
costs nobody else anything. The host itself never calls an environment.
"""

import contextlib
import gc
import os
import resource
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from whetstone.config.plugins import describe_error
from whetstone.environments.adapter import open_episode, snapshot
from whetstone.environments.messages import BadMessage, pack, unpack
from whetstone.environments.orphans import Orphans, adopt_orphans
from whetstone.environments.table import factory_of
from whetstone.environments.toolbox import load_tool, make_tools
from whetstone.errors import UserError


def serve(connection: Connection) -> None:
    """Fork and end episodes until the run is gone."""
    settings = connection.recv()
    try:
        factories = {spec: factory_of(spec) for spec in settings["environments"]}
        tools = [load_tool(spec) for spec in settings["tools"]]
    except UserError as error:
        return connection.send({"error": str(error)})
    gc.collect()
    gc.freeze()  # forks share what is there now
    connection.send({"ready": True})
    children: dict[int, int] = {}  # number of an episode -> process
    loaded = Loaded(
        factories=factories,
        tools=tools,
        tool_settings=settings["tool_settings"],
        memory_bytes=settings["memory_bytes"],
        with_state=settings["with_state"],
    )
    with tempfile.TemporaryDirectory(prefix="whet-episodes-", ignore_cleanup_errors=True) as folder:
        orphans = Orphans()
        adopt_orphans()
        try:
            _serve_all(connection, loaded, children, orphans, folder)
        finally:
            for child in list(children.values()):
                _kill(child, orphans, folder)
            orphans.end_all(())


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What every episode of a run is forked with."""

    factories: Mapping[str, Callable[..., Any]]
    tools: Sequence[Callable[..., Any]]
    tool_settings: Mapping[str, Any]
    memory_bytes: int
    with_state: bool


def _serve_all(
    connection: Connection, loaded: Loaded, children: dict[int, int], orphans: Orphans, folder: str
) -> None:
    while True:
        if (pause_s := orphans.pause_s) is not None and not connection.poll(pause_s):
            _reap(children, orphans, folder)
            orphans.end_all(set(children.values()))
        request = connection.recv()  # EOFError: the run is gone
        _reap(children, orphans, folder)
        if request["do"] == "close":
            return
        if request["do"] == "end":
            if (child := children.pop(request["number"], None)) is not None:
                _kill(child, orphans, folder)
            continue
        handle = reduction.recv_handle(connection)
        child = os.fork()
        if child == 0:
            connection.close()
            _serve_episode(handle, loaded, request, folder)
        os.close(handle)
        children[request["number"]] = child


def _reap(children: dict[int, int], orphans: Orphans, folder: str) -> None:
    """Forget episodes that have ended by themselves, and end what they have left behind."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            for number, child in list(children.items()):
                if child == ended:
                    del children[number]
                    _kill(child, orphans, folder)


def _kill(child: int, orphans: Orphans, folder: str) -> None:
    """End an episode with its group, and remove its temporary files. Who left the group is ended later."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)
    shutil.rmtree(os.path.join(folder, str(child)), ignore_errors=True)
    orphans.expect(child)


def _serve_episode(handle: int, loaded: Loaded, request: Mapping[str, Any], folder: str) -> NoReturn:
    """Answer the run's messages about one episode; never returns."""
    try:
        os.setsid()
        adopt_orphans()
        gc.enable()
        tempfile.tempdir = os.environ["TMPDIR"] = os.path.join(folder, str(os.getpid()))
        os.mkdir(tempfile.tempdir)
        _limit_memory(loaded.memory_bytes)
        with socket.socket(fileno=handle) as link:
            _answer_all(link, loaded, request)
    except BaseException:  # the run sees the socket close
        os._exit(1)
    os._exit(0)


def _limit_memory(memory_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
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
        try:
            if message["do"] == "reset":
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
        except MemoryError:
            answer = {"error": "out of memory (environment_memory_mb)"}
        except Exception as error:
            answer = {"error": describe_error(error)}
        link.sendall(pack(answer))
