"""The process that environments are forked from: it imports them once, so that episodes start at once.

Each episode is a fork with a socket of its own and limits on its memory. One that hangs, crashes or exits
costs nobody else anything. The host itself never calls an environment.
"""

import contextlib
import gc
import os
import resource
import signal
import socket
from collections.abc import Callable, Mapping
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from whetstone.config.plugins import describe_error, is_plugin, load_object
from whetstone.environments.adapter import open_episode
from whetstone.environments.games import GAMES
from whetstone.environments.messages import BadMessage, pack, unpack
from whetstone.errors import UserError


def factory_of(spec: str) -> Callable[..., Any]:
    """The class that a configuration names: a game of ours, or my_env.py:MyEnv."""
    return load_object(spec, "datasets") if is_plugin(spec) else GAMES[spec]


def serve(connection: Connection) -> None:
    """Fork and end episodes until the run is gone."""
    settings = connection.recv()
    try:
        factories = {spec: factory_of(spec) for spec in settings["environments"]}
    except UserError as error:
        return connection.send({"error": str(error)})
    gc.collect()
    gc.freeze()  # forks share what is there now
    connection.send({"ready": True})
    children: dict[int, int] = {}  # number of an episode -> process
    try:
        _serve_all(connection, factories, children, settings["memory_bytes"])
    finally:
        for child in children.values():
            _kill(child)


def _serve_all(
    connection: Connection,
    factories: Mapping[str, Callable[..., Any]],
    children: dict[int, int],
    memory_bytes: int,
) -> None:
    while True:
        request = connection.recv()  # EOFError: the run is gone
        _reap(children)
        if request["do"] == "close":
            return
        if request["do"] == "end":
            if (child := children.pop(request["number"], None)) is not None:
                _kill(child)
            continue
        handle = reduction.recv_handle(connection)
        child = os.fork()
        if child == 0:
            connection.close()
            _serve_episode(handle, factories[request["environment"]], request, memory_bytes)
        os.close(handle)
        children[request["number"]] = child


def _reap(children: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            for number, child in list(children.items()):
                if child == ended:
                    del children[number]


def _kill(child: int) -> None:
    """End an episode with what it has started."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)


def _serve_episode(
    handle: int, factory: Callable[..., Any], request: Mapping[str, Any], memory_bytes: int
) -> NoReturn:
    """Answer the run's messages about one episode; never returns."""
    try:
        os.setsid()
        gc.enable()
        _limit_memory(memory_bytes)
        with socket.socket(fileno=handle) as link:
            _answer_all(link, factory, request["settings"])
    except BaseException:  # the run sees the socket close
        os._exit(1)
    os._exit(0)


def _limit_memory(memory_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _answer_all(link: socket.socket, factory: Callable[..., Any], settings: Mapping[str, Any]) -> None:
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
                episode = open_episode(factory, settings)
                answer = episode.reset(message["seed"], message["row"])
            elif episode is None:
                raise BadMessage("an episode begins with reset")
            elif message["do"] == "step":
                answer = episode.step(message["text"], message["calls"])
            else:
                answer = episode.finish()
        except MemoryError:
            answer = {"error": "out of memory (environment_memory_mb)"}
        except Exception as error:
            answer = {"error": describe_error(error)}
        link.sendall(pack(answer))
