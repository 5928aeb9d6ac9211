"""Rollout servers as Ray actors on their own bundles; a server that dies is restarted at its address."""

import os
import threading
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from whetstone.commands.launch.args import LaunchArgs, read_config
from whetstone.engines.servers.process import RESTARTS, STOP_S, ServerProcess
from whetstone.errors import UserError
from whetstone.tasks.registry import with_room_for_turns

CHECK_EVERY_S = 1.0
SLACK_S = 30.0  # for Ray, beside what the server itself may take


@dataclass(frozen=True, kw_only=True)
class ServerStatus:
    """What an actor reports of its server."""

    url: str
    message: str | None = None  # for the user
    is_up: bool = False
    failure: str | None = None  # it can't be brought up


class EngineServer:
    """Runs inside a Ray actor: one server on the GPUs that Ray gave to it."""

    def __init__(self, train_args: list[str], number: int, has_gpus: bool) -> None:
        self._config = with_room_for_turns(read_config(train_args))
        self._number = number
        self._devices = os.environ["CUDA_VISIBLE_DEVICES"] if has_gpus else None  # which Ray has set
        self._process: ServerProcess | None = None
        self._stopped = False
        self._lock = threading.Lock()  # a stop and a look must not cross

    def begin(self, is_local: bool, before: str | None) -> ServerStatus:
        """Start it. `is_local`: only this machine need reach it. `before`: its address until it was lost."""
        import ray  # pyright: ignore[reportMissingImports]

        from whetstone.engines.servers.http import free_port
        from whetstone.engines.servers.setup import start_server

        host = "127.0.0.1" if is_local else ray.util.get_node_ip_address()
        old = urlsplit(before or "")
        port = old.port if old.port is not None and old.hostname == host else free_port()
        try:
            self._process = start_server(
                self._config, self._number, devices=self._devices, host=host, port=port
            )
        except UserError as error:
            return ServerStatus(url="", failure=str(error))
        if before is not None:
            self._process.restarts = 1  # so that its return is told
        return ServerStatus(url=self._process.command.url)

    def wait_until_up(self) -> ServerStatus:
        process = self._process
        assert process is not None
        try:
            process.wait_until_up(self._config.engines.server_timeout_s)
        except UserError as error:
            return ServerStatus(url=process.command.url, failure=str(error))
        return ServerStatus(url=process.command.url)

    def look(self) -> ServerStatus:
        """After a moment: start it again if it has died."""
        time.sleep(CHECK_EVERY_S)
        process = self._process
        assert process is not None
        with self._lock:
            if self._stopped:
                return ServerStatus(url=process.command.url)
            try:
                process.restart_if_dead()
                message = f"Up again: {process.command.url}." if process.has_recovered() else None
                return ServerStatus(url=process.command.url, message=message, is_up=process.restarts == 0)
            except UserError as error:
                return ServerStatus(url=process.command.url, failure=str(error))

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.stop()


@dataclass
class ServerActor:
    """A server and its actor, on the launcher's side."""

    number: int
    actor: Any
    url: str = ""
    answer: Any = None  # that is awaited; None: given up
    losses: int = 0  # of its actor, since it was last up


class Servers:
    """All servers of a run; none where it needs none."""

    def __init__(self, ray: Any, group: Any, args: LaunchArgs):
        self._ray, self._group, self._args = ray, group, args
        self._actors: list[ServerActor] = []
        table = ray.util.placement_group_table(group)
        self._is_local = len(set(table["bundles_to_node_id"].values())) == 1

    @property
    def settings(self) -> list[str]:
        """The settings that tell the ranks the addresses."""
        urls = [server.url for server in self._actors if server.answer is not None]
        return [f"rollout_servers={','.join(urls)}"] if urls else []

    def start(self) -> None:
        """Start all and wait until they answer; `UserError` with the reason of the first that can't."""
        for number in range(self._args.servers or 0):
            self._actors.append(ServerActor(number=number, actor=self._actor(number)))
        if not self._actors:
            return
        for server in self._actors:
            server.answer = server.actor.begin.remote(self._is_local, None)
        self._await_all()
        print(f"whet: starting {', '.join(server.url for server in self._actors)}.", flush=True)
        for server in self._actors:
            server.answer = server.actor.wait_until_up.remote()
        self._await_all()
        print("whet: all rollout servers are up.", flush=True)
        for server in self._actors:
            server.answer = server.actor.look.remote()

    def _await_all(self) -> None:
        """As they come, so that a failure is known at once."""
        waiting = {server.answer: server for server in self._actors}
        while waiting:
            (ready, *_), _ = self._ray.wait(list(waiting), num_returns=1)
            server = waiting.pop(ready)
            try:
                status = self._ray.get(ready)
            except self._ray.exceptions.RayActorError as error:
                raise UserError(
                    f"The actor of rollout server {server.number} died while it started ({_summary(error)}): "
                    "look into Ray's logs; a machine that ran out of memory is the commonest reason."
                ) from None
            if status.failure is not None:
                raise UserError(f"Rollout server {server.number}: {status.failure}")
            server.url = status.url

    def look_after(self) -> bool:
        """Restart what died. True: a server has another address, so the ranks must restart."""
        awaited = {server.answer: server for server in self._actors if server.answer is not None}
        if not awaited:
            return False
        ready, _ = self._ray.wait(list(awaited), num_returns=len(awaited), timeout=0)
        return True in [self._handle(awaited[answer]) for answer in ready]

    def _handle(self, server: ServerActor) -> bool:
        try:
            status = self._ray.get(server.answer)
        except self._ray.exceptions.RayActorError as error:
            if server.losses < RESTARTS:
                self._restart(server)
                return False
            failure = f"The Ray actor of {server.url} dies each time ({_summary(error)})."
            status = ServerStatus(url=server.url, failure=failure)
        if status.failure is not None:
            server.answer = None
            if all(other.answer is None for other in self._actors):
                raise UserError(status.failure)
            print(f"whet: {status.failure} Going on without it.", flush=True)
            return False
        if status.message is not None:
            print(f"whet: {status.message}", flush=True)
        server.losses = 0 if status.is_up else server.losses
        moved, server.url = status.url != server.url, status.url
        if moved:
            print(f"whet: a server came back as {server.url}: the ranks must start anew.", flush=True)
        server.answer = server.actor.look.remote()
        return moved

    def _restart(self, server: ServerActor) -> None:
        print(f"whet: the Ray actor of the server {server.url} died: starting both again.", flush=True)
        server.losses += 1
        server.actor = self._actor(server.number)
        server.answer = server.actor.begin.remote(self._is_local, server.url)

    def _actor(self, number: int) -> Any:
        args = self._args
        bundle = on_bundle(self._group, args.ranks + number)
        options = {"num_cpus": args.cpus_per_server, "num_gpus": args.gpus_per_server or 0}
        actor = self._ray.remote(EngineServer).options(**options, **bundle, max_concurrency=3)
        return actor.remote(args.train_args, number, bool(args.gpus_per_server))

    def stop(self) -> None:
        ends = [server.actor.stop.remote() for server in self._actors]
        if ends:
            self._ray.wait(ends, num_returns=len(ends), timeout=STOP_S + SLACK_S)
        for server in self._actors:
            self._ray.kill(server.actor)


def on_bundle(group: Any, number: int) -> dict[str, Any]:
    """Options that put an actor on a bundle of the placement group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore

    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=number)
    return {"scheduling_strategy": strategy}


def _summary(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
