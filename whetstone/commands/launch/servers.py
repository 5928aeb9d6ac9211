"""The rollout servers of a run as Ray actors on bundles of their own: started as `whet serve` starts them,
waited for, started again where they die, stopped at the end.

`EngineServer` runs inside an actor and keeps one server up; `Servers` is the launcher's side. A server that
dies comes back under its address, and so does one whose actor died; the ranks' pool (engines/servers/pool.py)
redoes what was lost and sends it the weights. Samples nothing.
"""

import os
import threading
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from whetstone.commands.launch.args import Launch
from whetstone.engines.servers.process import RESTARTS, STOP_S, ServerProcess
from whetstone.errors import UserError

CHECK_EVERY_S = 1.0
SLACK_S = 30.0  # for Ray, beside what the server itself may take


@dataclass(frozen=True, kw_only=True)
class News:
    """What an actor tells of its server."""

    url: str
    said: str | None = None  # for the user
    is_up: bool = False
    failure: str | None = None  # it can't be brought up


class EngineServer:
    """Runs inside a Ray actor: one server on the GPUs that Ray gave to it."""

    def __init__(self, words: list[str], number: int, has_gpus: bool) -> None:
        from whetstone.commands.launch.args import read_config

        self._config = read_config(words)
        self._number = number
        self._devices = os.environ["CUDA_VISIBLE_DEVICES"] if has_gpus else None  # which Ray has set
        self._process: ServerProcess | None = None
        self._stopped = False
        self._lock = threading.Lock()  # a stop and a look must not cross

    def begin(self, is_local: bool, before: str | None) -> News:
        """Start it. `is_local`: everybody is on this machine, so nobody else need reach it. `before`: the
        address that it had until it was lost.
        """
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
            return News(url="", failure=str(error))
        if before is not None:
            self._process.restarts = 1  # so that its return is told
        return News(url=self._process.command.url)

    def wait_until_up(self) -> News:
        from whetstone.engines.servers.setup import is_up

        process = self._process
        assert process is not None
        try:
            process.wait_until_up(lambda: is_up(process), self._config.engines.vllm_server_timeout)
        except UserError as error:
            return News(url=process.command.url, failure=str(error))
        return News(url=process.command.url)

    def look(self) -> News:
        """After a moment: start it again if it has died."""
        from whetstone.engines.servers.setup import is_up

        time.sleep(CHECK_EVERY_S)
        process = self._process
        assert process is not None
        with self._lock:
            if self._stopped:
                return News(url=process.command.url)
            try:
                is_back = process.restart_if_dead(lambda: is_up(process))
                said = f"Up again: {process.command.url}." if is_back else None
                return News(url=process.command.url, said=said, is_up=process.restarts == 0)
            except UserError as error:
                return News(url=process.command.url, failure=str(error))

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.stop()


@dataclass
class Placed:
    """A server as the launcher knows it."""

    number: int
    actor: Any
    url: str = ""
    answer: Any = None  # that is awaited; None: given up
    losses: int = 0  # of its actor, since it was last up


class Servers:
    """All servers of a run; none where it needs none."""

    def __init__(self, ray: Any, group: Any, asked: Launch):
        self._ray = ray
        self._group = group
        self._asked = asked
        self._placed: list[Placed] = []
        table = ray.util.placement_group_table(group)
        self._is_local = len(set(table["bundles_to_node_id"].values())) == 1

    @property
    def words(self) -> list[str]:
        """What the ranks are told."""
        urls = [one.url for one in self._placed if one.answer is not None]
        return [f"rollout_servers={','.join(urls)}"] if urls else []

    def start(self) -> None:
        """Start all and wait until they answer; `UserError` with the reason of the first that can't."""
        for number in range(self._asked.servers or 0):
            self._placed.append(Placed(number=number, actor=self._actor(number)))
        if not self._placed:
            return
        for one in self._placed:
            one.answer = one.actor.begin.remote(self._is_local, None)
        self._await_all()
        print(f"whet: starting {', '.join(one.url for one in self._placed)}.", flush=True)
        for one in self._placed:
            one.answer = one.actor.wait_until_up.remote()
        self._await_all()
        print("whet: all rollout servers are up.", flush=True)
        for one in self._placed:
            one.answer = one.actor.look.remote()

    def _await_all(self) -> None:
        """As they come, so that a failure is known at once."""
        waiting = {one.answer: one for one in self._placed}
        while waiting:
            (ready, *_), _ = self._ray.wait(list(waiting), num_returns=1)
            one = waiting.pop(ready)
            try:
                news = self._ray.get(ready)
            except self._ray.exceptions.RayActorError as error:
                raise UserError(
                    f"The actor of rollout server {one.number} died while it started ({_line(error)}): look "
                    "into Ray's logs; a machine that ran out of memory is the commonest reason."
                ) from None
            if news.failure is not None:
                raise UserError(f"Rollout server {one.number}: {news.failure}")
            one.url = news.url

    def look_after(self) -> bool:
        """Start again whatever died, and say so. True: one came back under another address, which ranks
        learn only when they are started anew. `UserError` once none can be brought up any more.
        """
        awaited = {one.answer: one for one in self._placed if one.answer is not None}
        if not awaited:
            return False
        ready, _ = self._ray.wait(list(awaited), num_returns=len(awaited), timeout=0)
        moved = [one for one in (awaited[answer] for answer in ready) if self._take(one)]
        return bool(moved)

    def _take(self, one: Placed) -> bool:
        try:
            news = self._ray.get(one.answer)
        except self._ray.exceptions.RayActorError as error:
            if one.losses < RESTARTS:
                self._renew(one)
                return False
            news = News(url=one.url, failure=f"The Ray actor of {one.url} dies each time ({_line(error)}).")
        if news.failure is not None:
            one.answer = None
            if all(other.answer is None for other in self._placed):
                raise UserError(news.failure)
            print(f"whet: {news.failure} Going on without it.", flush=True)
            return False
        if news.said is not None:
            print(f"whet: {news.said}", flush=True)
        one.losses = 0 if news.is_up else one.losses
        moved, one.url = news.url != one.url, news.url
        if moved:
            print(f"whet: a server came back as {one.url}: the ranks must start anew.", flush=True)
        one.answer = one.actor.look.remote()
        return moved

    def _renew(self, one: Placed) -> None:
        print(f"whet: the Ray actor of the server {one.url} died: starting both again.", flush=True)
        one.losses += 1
        one.actor = self._actor(one.number)
        one.answer = one.actor.begin.remote(self._is_local, one.url)

    def _actor(self, number: int) -> Any:
        asked = self._asked
        place = on_bundle(self._group, asked.ranks + number)
        options = {"num_cpus": asked.cpus_per_server, "num_gpus": asked.gpus_per_server or 0}
        made = self._ray.remote(EngineServer).options(**options, **place, max_concurrency=3)
        return made.remote(asked.words, number, bool(asked.gpus_per_server))

    def stop(self) -> None:
        ends = [one.actor.stop.remote() for one in self._placed]
        if ends:
            self._ray.wait(ends, num_returns=len(ends), timeout=STOP_S + SLACK_S)
        for one in self._placed:
            self._ray.kill(one.actor)


def on_bundle(group: Any, number: int) -> dict[str, Any]:
    """Options that put an actor on a bundle of the placement group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore

    place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=number)
    return {"scheduling_strategy": place}


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
