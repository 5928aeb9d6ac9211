"""Heartbeats: a failed rank ends all ranks soon, with its reason, instead of leaving them in a collective.

Every rank writes heartbeats to the launcher's store, and the first one checks them. A failing rank publishes
its reason; a rank without a heartbeat for `timeout_s` is declared dead; a rank that loses the store exits. It
exits by `os._exit`, since the main thread may wait inside a collective.
"""

import contextlib
import logging
import os
import re
import socket
import sys
import threading
import time
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from whetstone.errors import first_line, known_failure
from whetstone.parallel.mesh import Ranks, restarts

logger = logging.getLogger("whetstone")
EXIT_CODE = 3  # of a rank that ends because of another
GRACE_S = 4.0  # for a main thread that is about to end for the same reason


class Heartbeat:
    """`with Heartbeat(ranks, timeout_s):` around all collective work. Does nothing in a single process."""

    def __init__(self, ranks: Ranks, timeout_s: float):
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._pause_s = min(2.0, timeout_s / 5)
        self._over = threading.Event()
        self._last_contact = time.monotonic()
        self._store: Store | None = None
        self._ending = threading.Lock()  # held by the thread that exits
        self._lost = ""  # what the main thread's collective said when its connection was lost

    def __enter__(self) -> Self:
        if self._ranks.world_size == 1:
            return self
        # A connection of our own: the main thread may keep the other one busy.
        client = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=self._timeout_s),
        )
        name = os.environ.get("TORCHELASTIC_RUN_ID", "run")
        self._store = PrefixStore(f"whetstone/{name}/{restarts()}", client)
        self._last_contact = time.monotonic()
        for work in (self._send_heartbeats, self._watch_store):
            threading.Thread(target=work, name="watch", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._store is None:
            return
        if error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
            if is_lost_connection(error):
                # Somebody else's failure: the threads find out whose, and end this process with it. Said at
                # once all the same, for the launcher may end us before they do.
                lost = f"connection to another rank was lost ({_explained(error)})"
                logger.error(f"The {lost}.")
                self._lost = f"the {lost}"
                threading.Event().wait()
            self._publish(f"rank {self._ranks.rank} on {socket.gethostname()} ended: {_explained(error)}")
        self._over.set()
        with contextlib.suppress(RuntimeError):  # the store is gone: the first rank ended before this one
            self._store.set(f"alive/{self._ranks.rank}", "done")

    def _send_heartbeats(self) -> None:
        """Write heartbeats, and exit when another rank has failed. May block with the network."""
        store = self._store
        assert store is not None
        seen: dict[int, tuple[bytes, float]] = {}
        lost_since: float | None = None
        count = 0
        while not self._over.wait(self._pause_s if count else 0):
            count += 1
            try:
                store.set(f"alive/{self._ranks.rank}", f"{count} {socket.gethostname()}")
                if self._ranks.is_main:
                    self._check_ranks(store, seen)
                if store.check(["failed"]):
                    self._exit(store.get("failed").decode(), grace_s=GRACE_S)
            except RuntimeError:  # the store is away: `_watch_store` gives it a while to come back
                continue
            self._last_contact = now = time.monotonic()
            # A rank that died is known by now, however slow this machine is: the same rounds count both.
            lost_since = lost_since or (now if self._lost else None)
            if lost_since is not None and now - lost_since > self._timeout_s + 2 * self._pause_s:
                self._exit(self._lost)

    def _check_ranks(self, store: Store, seen: dict[int, tuple[bytes, float]]) -> None:
        now = time.monotonic()
        for rank in range(self._ranks.world_size):
            key = f"alive/{rank}"
            beat = store.get(key) if store.check([key]) else b""
            if rank not in seen or seen[rank][0] != beat:
                seen[rank] = (beat, now)
            silent_s = now - seen[rank][1]
            if silent_s > self._timeout_s and beat != b"done":
                where = beat.decode().partition(" ")[2] or "an unknown host"
                self._publish(
                    f"rank {rank} on {where} has not been heard of for {silent_s:.0f} s: it died or was cut "
                    "off"
                )

    def _watch_store(self) -> None:
        """Exit when the store has been unreachable for too long. Does not block."""
        while not self._over.wait(1.0):
            if time.monotonic() - self._last_contact > self._timeout_s:
                host = os.environ["MASTER_ADDR"]
                self._exit(f"the first host ({host}) has been out of reach for {self._timeout_s:.0f} s")

    def _publish(self, reason: str) -> None:
        """The first reason stays."""
        assert self._store is not None
        with contextlib.suppress(RuntimeError):  # out of reach: the others will miss our heartbeats
            self._store.compare_set("failed", "", reason)

    def _exit(self, reason: str, grace_s: float = 0.0) -> None:
        self._ending.acquire()  # never given back: the first reason known here is the one that is said
        if self._over.wait(grace_s):
            return
        text = (
            f"This run ends because {reason}. Start it again with auto_resume=true (or let torchrun "
            "--max-restarts do it): it resumes from the last checkpoint."
        )
        if self._ranks.is_main:
            logger.error(text)
        elif self._ranks.local_rank == 0:  # one voice for each host
            print(f"whet: {text}", file=sys.stderr, flush=True)
        os._exit(EXIT_CODE)


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error is what a collective says when another rank has gone."""
    phrases = "connection (closed by peer|reset)|timed out waiting|gloo|socket timeout|broken pipe"
    is_phrased = re.search(phrases, str(error).lower()) is not None
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and is_phrased)


def _explained(error: BaseException) -> str:
    """The first line of an error, and what it means where that is known."""
    meaning = known_failure(str(error))
    return first_line(error) if meaning is None else f"{first_line(error)}. {meaning}"
