"""Several servers as one engine.

A thread per request takes samples from one queue. A server that dies loses nothing: its requests go back to
the queue. A restarted server gets the current weights first, and completions of other weights are never
yielded. The caller's thread yields results, revives servers and sends weights.
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

from whetstone.engines.base import EngineBase, GenerationOutput, Request, RequestStream, SamplingParams
from whetstone.engines.servers.client import InvalidReply, Server
from whetstone.engines.servers.http import RequestRejected, Unreachable
from whetstone.engines.servers.process import ServerProcess
from whetstone.engines.servers.request_queue import RequestQueue
from whetstone.engines.servers.weights import WeightFolders, WeightUpdate
from whetstone.errors import UserError
from whetstone.model.policy import Policy

logger = logging.getLogger("whetstone")

LOCAL = ("127.0.0.1", "localhost", "0.0.0.0", "::1", socket.gethostname())
CONFIRM_EVERY_S = 0.05  # at most so often is a server asked which weights it has
CHECK_EVERY_S = 1.0  # at servers that are down
STREAM_POLL_S = 0.01  # for requests that come while others are sampled
FAILURES_IN_A_ROW = 5  # of one server without a single completion in between


class WrongWeights(Exception):
    """The server has other weights than it was sent: it was restarted."""


@dataclass
class ServerHandle:
    """A server of the pool and its state."""

    server: Server
    process: ServerProcess | None = None  # where we started it ourselves
    is_connected: bool = False
    weight_version: str | None = None  # of the weights it was sent last
    generation: int = 0  # counts its connections: threads of an earlier one end
    trouble: str = "it does not answer"
    failures: int = 0
    confirmed_at: float = 0.0  # start of the last request that confirmed its weights
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return self.server.url


@dataclass(frozen=True)
class ServerSharing:
    """The processes of one run that share its servers: the leader sends weights."""

    is_leader: bool = True
    broadcast: Callable[[Any], Any] = lambda value: value  # gives every process the leader's value


@dataclass(frozen=True, kw_only=True)
class PushResult:
    """The result of the leader's weight update, for the other processes."""

    version: str = ""
    folder: Path | None = None
    loaded_instances: dict[str, str | None] = field(default_factory=dict)  # by url of servers that have it
    failure: str | None = None


class ServerPool(EngineBase):
    def __init__(
        self,
        handles: list[ServerHandle],
        policy: Policy,
        *,
        max_in_flight: int,
        timeout_s: float,
        weight_dir: str | None,
        trains_meanwhile: bool = False,
        sharing: ServerSharing | None = None,
    ):
        super().__init__(policy)
        self.handles = handles
        self.may_sleep = sharing is None  # the others may still be sampling when we are done
        self.sharing = sharing or ServerSharing()
        self.max_in_flight = max_in_flight  # of each server
        self.timeout_s = timeout_s
        self.num_retried = 0  # samples that had to be drawn again because their server was lost
        self.weight_dir = weight_dir
        self.trains_meanwhile = trains_meanwhile  # whether it trains while its last version is sampled from
        self.folders = WeightFolders(weight_dir)
        self.run = uuid.uuid4().hex[:8]  # so that no other run's version 12 is taken for ours
        self.weights: WeightUpdate | None = None
        self.loaded_instances: dict[str, str | None] = {}  # as the leader reports
        self.num_generating = 0
        self.last_check = 0.0
        self.all_down_since: float | None = None  # when the last server was lost

    def update_weights(self, policy_version: int) -> None:
        """All processes call it together; only the leader needs the weights of its `policy`."""
        assert not self.num_generating, "weights must not change while samples are drawn with them"
        self.weights, result = None, None  # a server that comes up now waits for the new ones
        if self.sharing.is_leader:
            try:
                result = self._send(policy_version)
            except UserError as error:
                result = PushResult(failure=str(error))
        result = self.sharing.broadcast(result)
        if result.failure is not None:
            raise UserError(result.failure)
        self.policy_version = policy_version
        if not self.sharing.is_leader:
            self.weights = WeightUpdate(version=result.version, policy=self.policy, folder=result.folder)
            self.loaded_instances = result.loaded_instances
            for handle in self._wait_for_servers():
                self._load(handle)
            self._wait_until(self._any_ready)

    def _send(self, policy_version: int) -> PushResult:
        """New weights to every server that is up; returns once one has them."""
        connected = self._wait_for_servers()
        version = f"{self.run}-{policy_version}"
        wants_folder = self.policy.is_lora or any(handle.server.wants_folder for handle in connected)
        remote = [handle.url for handle in connected if handle.server.http.host not in LOCAL]
        if wants_folder and remote and self.weight_dir is None:
            raise UserError(
                f"Weights go to {remote[0]} by file, and it runs on another machine: set weight_transfer_dir "
                "to a folder that both see, or start it for weight_transfer: nccl (docs/servers.md)."
            )
        folder = self.folders.write(self.policy, version) if wants_folder else None
        self.weights = WeightUpdate(version=version, policy=self.policy, folder=folder)
        with ThreadPoolExecutor(max_workers=len(connected)) as pool:
            list(pool.map(self._load, connected))
        if folder is not None:
            self.folders.keep_only(folder)
        self._wait_until(self._any_ready)
        loaded = {handle.url: handle.server.identity for handle in self.handles if self._is_ready(handle)}
        return PushResult(version=version, folder=folder, loaded_instances=loaded)

    def _wait_for_servers(self) -> list[ServerHandle]:
        """Those that are up, at least one."""
        self._wait_until(lambda: any(handle.is_connected for handle in self.handles))
        return [handle for handle in self.handles if handle.is_connected]

    def _load(self, handle: ServerHandle) -> None:
        """Send the current weights, unless another process has done so; a server that fails at it is down."""
        assert self.weights is not None
        try:
            if self.sharing.is_leader or not handle.server.accept_existing_weights(
                self.weights, self.loaded_instances.get(handle.url)
            ):
                if not self.sharing.is_leader and self.weights.folder is None:
                    handle.is_connected = False  # only the first process can send these
                    return
                handle.server.load(self.weights)
        except Unreachable as error:
            self._set_down(handle, f"it did not take the weights: {error}")
        except RequestRejected as error:
            raise UserError(f"{handle.url} refuses the new weights: {error}.") from None
        else:
            handle.weight_version = self.weights.version
            handle.generation += 1

    def _is_ready(self, handle: ServerHandle) -> bool:
        return (
            handle.is_connected and self.weights is not None and handle.weight_version == self.weights.version
        )

    def _any_ready(self) -> bool:
        return any(self._is_ready(handle) for handle in self.handles)

    def generate(self, requests: list[Request], sampling: SamplingParams) -> Iterator[GenerationOutput]:
        return self.generate_open(requests, sampling, None)

    def generate_open(
        self, requests: list[Request], sampling: SamplingParams, stream: RequestStream | None
    ) -> Iterator[GenerationOutput]:
        assert self.weights is not None, "update_weights comes before generate"
        jobs = RequestQueue(requests, sampling)
        num_expected = max(jobs.num_left, 0 if stream is None else stream.num_sequences)
        started: dict[int, int] = {}  # index of a server -> its connection that has threads
        self.num_generating += 1
        try:
            while jobs.num_left or stream is not None:
                if stream is not None:
                    jobs.cancel(stream.cancelled())
                    jobs.add(stream.take(wait=not jobs.num_left))
                    if not jobs.num_left:
                        return
                for index, handle in enumerate(self.handles):
                    if self._is_ready(handle) and started.get(index) != handle.generation:
                        started[index] = handle.generation
                        self._start(handle, jobs, num_expected)
                self._revive_servers()
                try:
                    result = jobs.results.get(timeout=0.2 if stream is None else STREAM_POLL_S)
                except queue.Empty:
                    continue
                if isinstance(result, Exception):
                    raise result
                jobs.num_left -= 1
                yield result
        finally:
            jobs.close()
            for handle in self.handles:
                handle.server.http.cancel_all()
            for thread in jobs.threads:
                thread.join()
            self.num_generating -= 1

    def _start(self, handle: ServerHandle, jobs: RequestQueue, num_samples: int) -> None:
        """A thread per request in flight, and a fair share of a small batch for each server."""
        share = -(-num_samples // len(self.handles))
        for _ in range(min(self.max_in_flight, max(1, share))):
            thread = threading.Thread(target=self._serve, args=(handle, handle.generation, jobs), daemon=True)
            jobs.threads.append(thread)
            thread.start()

    def _serve(self, handle: ServerHandle, generation: int, jobs: RequestQueue) -> None:
        while (job := jobs.get(handle.server.http)) is not None:
            is_current = self._is_ready(handle) and handle.generation == generation
            result = self._result(handle, jobs, job) if is_current else None
            if not jobs.finish(job):
                continue
            if isinstance(result, Unreachable | WrongWeights) and not jobs.is_closed:
                self.num_retried += 1
                if handle.generation == generation:  # else it is back already
                    self._set_down(handle, str(result))
            if result is None or isinstance(result, Unreachable | WrongWeights):
                jobs.put_back(job)
                return
            if isinstance(result, RequestRejected | InvalidReply):
                result = UserError(f"{handle.url} answered a request for a completion with {result}.")
            jobs.results.put(result)
            if isinstance(result, Exception):
                return
            handle.failures = 0

    def _result(
        self, handle: ServerHandle, jobs: RequestQueue, job: tuple[int, int]
    ) -> GenerationOutput | Exception:
        try:
            return self._sample(handle, jobs, job)
        except Exception as error:  # whatever it is must reach the caller, not die with a thread
            return error

    def _sample(self, handle: ServerHandle, jobs: RequestQueue, job: tuple[int, int]) -> GenerationOutput:
        """A completion that is known to be of the current weights."""
        request, sample = job
        assert self.weights is not None
        wanted = jobs.requests[request]
        sampling = wanted.sample_params(sample, jobs.sampling)
        reply = handle.server.complete(wanted.prompt_ids, wanted.seeds[sample], sampling)
        if reply.weight_version is None:
            self._confirm(handle, time.monotonic())
        elif reply.weight_version != self.weights.version:
            raise WrongWeights(
                f"it answered with the weights {reply.weight_version} instead of {self.weights.version}"
            )
        return self.output(request, sample, reply.token_ids, reply.logprobs, reply.finish)

    def _confirm(self, handle: ServerHandle, received_at: float) -> None:
        """Ask a server which weights it has, after its answer. Weights change only by our pushes, never while
        requests are under way, and are lost when it starts anew: if it has the right ones now, it had them
        when it answered. One question serves all answers that came before it.
        """
        assert self.weights is not None
        with handle.lock:
            if handle.confirmed_at > received_at:
                return
            time.sleep(max(0.0, handle.confirmed_at + CONFIRM_EVERY_S - time.monotonic()))
            started_at = time.monotonic()
            version = handle.server.loaded_version()
            if version != self.weights.version:
                raise WrongWeights(
                    f"it was started anew and has the weights {version} instead of {self.weights.version}"
                )
            handle.confirmed_at = started_at

    def _set_down(self, handle: ServerHandle, trouble: str) -> None:
        with handle.lock:
            if not handle.is_connected:
                return
            handle.is_connected, handle.weight_version, handle.trouble = False, None, trouble
            handle.failures += 1
        handle.server.http.cancel_all()
        others = sum(other.is_connected for other in self.handles)
        then = f"its work goes to the other {others}" if others else "waiting for its return"
        logger.warning(f"{handle.url} is lost ({trouble}): {then}.")

    def _revive_servers(self) -> None:
        """Restart every server that can be restarted; it gets the current weights before it is used."""
        if time.monotonic() - self.last_check < CHECK_EVERY_S:
            return
        down = [handle for handle in self.handles if not handle.is_connected]
        if down:
            with ThreadPoolExecutor(max_workers=len(down)) as pool:
                list(pool.map(self._try_connect, down))
        for handle in down:
            if handle.is_connected and self.weights is not None:
                if self.weights.folder is None and self.trains_meanwhile:
                    handle.is_connected = False  # its weights are gone from the policy: the next push
                    continue
                self._load(handle)
                if self._is_ready(handle):
                    logger.info(f"{handle.url} is back and has the current weights.")
        self.last_check = time.monotonic()
        self._fail_if_all_down()

    def _try_connect(self, handle: ServerHandle) -> None:
        if handle.failures >= FAILURES_IN_A_ROW:
            raise UserError(
                f"{handle.url} failed {handle.failures} times in a row, the last time because "
                f"{handle.trouble}: look into its log, or leave it out of rollout_servers."
            )
        if handle.process is not None:
            handle.process.restart_if_dead()
        try:
            if handle.server.http.is_healthy():
                handle.server.connect()
                handle.is_connected = True
                if handle.process is not None:
                    handle.process.restarts = 0
        except Unreachable as error:
            handle.trouble = str(error)

    def _fail_if_all_down(self) -> None:
        if any(handle.is_connected for handle in self.handles):
            self.all_down_since = None
            return
        self.all_down_since = self.all_down_since or time.monotonic()
        if time.monotonic() - self.all_down_since > self.timeout_s:
            names = ", ".join(f"{handle.url} ({handle.trouble})" for handle in self.handles)
            raise UserError(
                f"No rollout server is up, and none has come up within {self.timeout_s:g} s: {names}. Start "
                "one with `whet serve CONFIG`, name running ones with rollout_servers, or raise "
                "server_timeout_s; auto_resume=true resumes the run."
            )

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._revive_servers()
            if not condition():
                time.sleep(0.1)

    def sleep(self) -> None:
        if self.may_sleep:
            self._call_all(lambda server: server.sleep())

    def wake(self) -> None:
        self._call_all(lambda server: server.wake())

    def _call_all(self, function: Callable[[Server], None]) -> None:
        for handle in self.handles:
            if handle.is_connected:
                try:
                    function(handle.server)
                except Unreachable as error:
                    self._set_down(handle, str(error))

    def close(self) -> None:
        for handle in self.handles:
            handle.server.close()
            if handle.process is not None:
                handle.process.stop()
        self.folders.close()
