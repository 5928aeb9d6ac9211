"""The samples of one `generate` on servers, and their results."""

import queue
import threading
from collections import deque
from collections.abc import Sequence

from whetstone.engines.base import GenerationOutput, Request, SamplingParams
from whetstone.engines.servers.http import HttpClient


class RequestQueue:
    """The samples of one `generate`: the threads of all servers take from it and put back to it."""

    def __init__(self, requests: list[Request], sampling: SamplingParams):
        self.requests = list(requests)
        self.sampling = sampling
        self.waiting = deque((r, s) for r, request in enumerate(requests) for s in range(len(request.seeds)))
        self.num_left = len(self.waiting)
        self.in_flight: dict[tuple[int, int], tuple[HttpClient, int]] = {}  # with the thread that has it
        self.results: queue.SimpleQueue[GenerationOutput | Exception] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []
        self.is_closed = False
        self._changed = threading.Condition()

    def get(self, client: HttpClient) -> tuple[int, int] | None:
        """The next sample; waits while others in flight may be put back. None: the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.waiting or self.is_closed)
            if self.is_closed:
                return None
            job = self.waiting.popleft()
            self.in_flight[job] = client, threading.get_ident()
            return job

    def finish(self, job: tuple[int, int]) -> bool:
        """It is no longer in flight. False: it was cancelled, and nobody wants it."""
        with self._changed:
            return self.in_flight.pop(job, None) is not None

    def cancel(self, samples: Sequence[tuple[int, int]]) -> None:
        """These (request, sample) end, and the servers stop sampling them; some may have ended."""
        with self._changed:
            for job in samples:
                if job in self.waiting:
                    self.waiting.remove(job)
                    self.num_left -= 1
                elif (owner := self.in_flight.pop(job, None)) is not None:
                    client, thread = owner
                    client.cancel(thread)
                    self.num_left -= 1

    def add(self, requests: list[Request]) -> None:
        with self._changed:
            for request in requests:
                jobs = [(len(self.requests), sample) for sample in range(len(request.seeds))]
                self.requests.append(request)
                self.waiting.extend(jobs)
                self.num_left += len(jobs)
            self._changed.notify_all()

    def put_back(self, job: tuple[int, int]) -> None:
        with self._changed:
            self.waiting.appendleft(job)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
