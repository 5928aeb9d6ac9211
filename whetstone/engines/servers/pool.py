"""Several servers as one engine: work is spread by who is free, a server that dies loses nothing, one that
comes back gets the current weights first, and no completion of other weights is ever handed on.

A thread per request takes samples from one queue. The caller's thread hands results on and looks after
servers that are down; it alone sends weights. What a server is and how it is spoken to: servers.py; the
processes of servers that we started ourselves: launch.py.
"""

import logging
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whetstone.engines.base import Request, Sampled, Sampling
from whetstone.engines.servers.client import Malformed, Reply, Server
from whetstone.engines.servers.http import Refused, Unreachable
from whetstone.engines.servers.process import ServerProcess
from whetstone.engines.servers.queue import Work
from whetstone.engines.servers.weights import Push, WeightFolders
from whetstone.errors import UserError
from whetstone.model.policy import Policy
from whetstone.types import Completion

logger = logging.getLogger("whetstone")

LOCAL = ("127.0.0.1", "localhost", "0.0.0.0", "::1", socket.gethostname())
CONFIRM_EVERY_S = 0.05  # at most so often is a server asked which weights it has
LOOK_EVERY_S = 1.0  # at servers that are down
FAILURES_IN_A_ROW = 5  # of one server without a single completion in between


class Stale(Exception):
    """The server has other weights than it was sent: it was started anew."""


@dataclass
class Member:
    """A server of the fleet and how it fares."""

    server: Server
    process: ServerProcess | None = None  # where we started it ourselves
    is_connected: bool = False
    label: str | None = None  # of the weights it was sent last
    arrivals: int = 0  # how often it has come (back): threads of an earlier time end by it
    trouble: str = "it does not answer"
    failures: int = 0
    confirmed_at: float = 0.0  # begin of the last question that found the right weights
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return self.server.calls.url


@dataclass(frozen=True, kw_only=True)
class Team:
    """The processes of one run that share its servers: the first sends weights, the others learn of it."""

    leads: bool = True
    tell: Callable[[Any], Any] = lambda what: what  # gives every process what the first one has


@dataclass(frozen=True, kw_only=True)
class News:
    """What the first process tells the others of its push."""

    label: str = ""
    folder: Path | None = None
    holders: dict[str, str | None] = field(default_factory=dict)  # servers that have it -> their identity
    failure: str | None = None


class Fleet:
    def __init__(
        self,
        members: list[Member],
        policy: Policy,
        *,
        max_in_flight: int,
        timeout_s: float,
        weight_dir: str | None,
        policy_moves: bool = False,
        team: Team | None = None,
    ):
        self.members = members
        self.may_sleep = team is None  # the others may still be sampling when we are done
        self.team = team or Team()
        self.policy = policy
        self.max_in_flight = max_in_flight  # of each server
        self.timeout_s = timeout_s
        self.policy_version = 0
        self.num_redone = 0  # samples that had to be drawn again because their server was lost
        self.weight_dir = weight_dir
        self.policy_moves = policy_moves  # whether it trains while its last version is sampled from
        self.folders = WeightFolders(weight_dir)
        self.run = uuid.uuid4().hex[:8]  # so that no other run's version 12 is taken for ours
        self.push: Push | None = None
        self.holders: dict[str, str | None] = {}  # as another process of the team told
        self.num_generating = 0
        self.last_look = 0.0
        self.alone_since: float | None = None  # when the last server was lost

    # Weights

    def update_weights(self, policy_version: int) -> None:
        """In a team, all call it together; only the first process needs the weights of its `policy`."""
        assert not self.num_generating, "weights must not change while samples are drawn with them"
        self.push, failure = None, None  # whoever comes up now waits for the new ones
        if self.team.leads:
            try:
                self._send(policy_version)
            except UserError as error:
                failure = str(error)
        news = self.team.tell(self._news(failure) if self.team.leads else None)
        if news.failure is not None:
            raise UserError(news.failure)
        self.policy_version = policy_version
        if not self.team.leads:
            self.push = Push(label=news.label, policy=self.policy, folder=news.folder)
            self.holders = news.holders
            self._wait_until(lambda: any(member.is_connected for member in self.members))
            for member in self.members:
                if member.is_connected:
                    self._load(member)
            self._wait_until(self._any_ready)

    def _news(self, failure: str | None) -> "News":
        if self.push is None:
            return News(failure=failure)
        holders = {member.url: member.server.identity for member in self.members if self._is_ready(member)}
        return News(label=self.push.label, folder=self.push.folder, holders=holders, failure=failure)

    def _send(self, policy_version: int) -> None:
        """New weights to every server that is up; returns once one has them."""
        self._wait_until(lambda: any(member.is_connected for member in self.members))
        label = f"{self.run}-{policy_version}"
        connected = [member for member in self.members if member.is_connected]
        wants_folder = self.policy.is_lora or any(member.server.wants_folder for member in connected)
        if wants_folder:
            self._check_that_all_see_files(connected)
        folder = self.folders.write(self.policy, label) if wants_folder else None
        self.push = Push(label=label, policy=self.policy, folder=folder)
        with ThreadPoolExecutor(max_workers=len(connected)) as pool:
            list(pool.map(self._load, connected))
        if folder is not None:
            self.folders.keep_only(folder)
        self._wait_until(self._any_ready)

    def _check_that_all_see_files(self, members: list[Member]) -> None:
        away = [member.url for member in members if member.server.calls.host not in LOCAL]
        if away and self.weight_dir is None:
            raise UserError(
                f"Weights go to {away[0]} by file, and it runs on another machine: set weight_transfer_dir "
                "to a folder that both see, or start it for weight_transfer: nccl (docs/servers.md)."
            )

    def _load(self, member: Member) -> None:
        """Send the current weights, unless another process of the team has done so; a server that fails at
        it is down.
        """
        assert self.push is not None
        try:
            if self.team.leads or not member.server.adopt(self.push, self.holders.get(member.url)):
                if not self.team.leads and self.push.folder is None:
                    member.is_connected = False  # only the first process can send these
                    return
                member.server.load(self.push)
        except Unreachable as error:
            self._set_down(member, f"it did not take the weights: {error}")
        except Refused as error:
            raise UserError(f"{member.url} refuses the new weights: {error}.") from None
        else:
            member.label = self.push.label
            member.arrivals += 1

    def _is_ready(self, member: Member) -> bool:
        return member.is_connected and self.push is not None and member.label == self.push.label

    def _any_ready(self) -> bool:
        return any(self._is_ready(member) for member in self.members)

    # Sampling

    def generate(self, requests: list[Request], sampling: Sampling) -> Iterator[Sampled]:
        assert self.push is not None, "update_weights comes before generate"
        work = Work(requests, sampling)
        started: dict[int, int] = {}  # member -> which of its arrivals has threads at this work
        self.num_generating += 1
        try:
            while work.num_left:
                for index, member in enumerate(self.members):
                    if self._is_ready(member) and started.get(index) != member.arrivals:
                        started[index] = member.arrivals
                        self._start(member, work)
                self._look_after_the_down()
                try:
                    result = work.results.get(timeout=0.2)
                except queue.Empty:
                    continue
                if isinstance(result, Exception):
                    raise result
                work.num_left -= 1
                yield result
        finally:
            work.end()
            for member in self.members:
                member.server.calls.break_off()
            for thread in work.threads:
                thread.join()
            self.num_generating -= 1

    def _start(self, member: Member, work: Work) -> None:
        """The threads of a server: each has one request under way. A fair share, so that the first server
        does not take all of a small batch.
        """
        share = -(-work.num_total // len(self.members))
        for _ in range(min(self.max_in_flight, max(1, share))):
            thread = threading.Thread(target=self._serve, args=(member, member.arrivals, work), daemon=True)
            work.threads.append(thread)
            thread.start()

    def _serve(self, member: Member, arrival: int, work: Work) -> None:
        while (job := work.take()) is not None:
            if not self._is_ready(member) or member.arrivals != arrival:
                work.give_back(job)
                return
            try:
                sampled = self._sample(member, work, job)
            except (Unreachable, Stale) as error:
                if not work.ended:
                    self.num_redone += 1
                    self._set_down(member, str(error))
                work.give_back(job)
                return
            except (Refused, Malformed) as error:
                work.results.put(UserError(f"{member.url} answered a request for a completion with {error}."))
                return
            except Exception as error:  # whatever it is must reach the caller, not die with a thread
                work.results.put(error)
                return
            member.failures = 0
            work.results.put(sampled)

    def _sample(self, member: Member, work: Work, job: tuple[int, int]) -> Sampled:
        """A completion that is known to be of the current weights."""
        request, sample = job
        assert self.push is not None
        prompt, seed = work.requests[request].prompt_ids, work.requests[request].seeds[sample]
        reply: Reply = member.server.complete(prompt, seed, work.sampling)
        if reply.version is None:
            self._confirm(member, time.monotonic())
        elif reply.version != self.push.label:
            raise Stale(f"it answered with the weights {reply.version} instead of {self.push.label}")
        completion = Completion(
            token_ids=reply.token_ids,
            logprobs=reply.logprobs,
            finish=reply.finish,
            policy_version=self.policy_version,
        )
        return Sampled(request=request, sample=sample, completion=completion)

    def _confirm(self, member: Member, received_at: float) -> None:
        """Ask a server which weights it has, after its answer. Weights change only by our pushes, never while
        requests are under way, and are lost when it starts anew: if it has the right ones now, it had them
        when it answered. One question serves all answers that came before it.
        """
        assert self.push is not None
        with member.lock:
            if member.confirmed_at > received_at:
                return
            time.sleep(max(0.0, member.confirmed_at + CONFIRM_EVERY_S - time.monotonic()))
            begun = time.monotonic()
            found = member.server.version()
            if found != self.push.label:
                raise Stale(f"it was started anew and has the weights {found} instead of {self.push.label}")
            member.confirmed_at = begun

    # Servers that are down

    def _set_down(self, member: Member, trouble: str) -> None:
        with member.lock:
            if not member.is_connected:
                return
            member.is_connected, member.label, member.trouble = False, None, trouble
            member.failures += 1
        member.server.calls.break_off()
        others = sum(other.is_connected for other in self.members)
        then = f"its work goes to the other {others}" if others else "waiting for its return"
        logger.warning(f"{member.url} is lost ({trouble}): {then}.")

    def _look_after_the_down(self) -> None:
        """Bring back whoever can be brought back; it gets the current weights before it is used."""
        if time.monotonic() - self.last_look < LOOK_EVERY_S:
            return
        down = [member for member in self.members if not member.is_connected]
        if down:
            with ThreadPoolExecutor(max_workers=len(down)) as pool:
                list(pool.map(self._try_to_connect, down))
        for member in down:
            if member.is_connected and self.push is not None:
                if self.push.folder is None and self.policy_moves:
                    member.is_connected = False  # its weights are gone from the policy: the next push
                    continue
                self._load(member)
                if self._is_ready(member):
                    logger.info(f"{member.url} is back and has the current weights.")
        self.last_look = time.monotonic()
        self._complain_when_alone()

    def _try_to_connect(self, member: Member) -> None:
        if member.failures >= FAILURES_IN_A_ROW:
            raise UserError(
                f"{member.url} failed {member.failures} times in a row, the last time because "
                f"{member.trouble}: look into its log, or leave it out of rollout_servers."
            )
        if member.process is not None:
            member.process.keep_running()
        try:
            if member.server.is_healthy():
                member.server.connect()
                member.is_connected = True
                if member.process is not None:
                    member.process.restarts = 0
        except Unreachable as error:
            member.trouble = str(error)

    def _complain_when_alone(self) -> None:
        if any(member.is_connected for member in self.members):
            self.alone_since = None
            return
        self.alone_since = self.alone_since or time.monotonic()
        if time.monotonic() - self.alone_since > self.timeout_s:
            names = ", ".join(f"{member.url} ({member.trouble})" for member in self.members)
            raise UserError(
                f"No rollout server is up, and none has come up within {self.timeout_s:g} s: {names}. Start "
                "one with `whet serve CONFIG`, name running ones with rollout_servers, or raise "
                "server_timeout_s; a run that had begun goes on with auto_resume=true."
            )

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._look_after_the_down()
            if not is_so():
                time.sleep(0.1)

    # The rest of the seam

    def sleep(self) -> None:
        if self.may_sleep:
            self._tell_all(lambda server: server.sleep())

    def wake(self) -> None:
        self._tell_all(lambda server: server.wake())

    def _tell_all(self, what: Callable[[Server], None]) -> None:
        for member in self.members:
            if member.is_connected:
                try:
                    what(member.server)
                except Unreachable as error:
                    self._set_down(member, str(error))

    def close(self) -> None:
        for member in self.members:
            if member.process is not None:
                member.process.stop()
        self.folders.close()
