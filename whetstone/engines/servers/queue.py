"""The samples of one `generate`: a queue that the threads of all servers take from and put back to."""

import queue
import threading
from collections import deque

from whetstone.engines.base import GenerationOutput, Request, SamplingParams


class RequestQueue:
    def __init__(self, requests: list[Request], sampling: SamplingParams):
        self.requests = requests
        self.sampling = sampling
        self.waiting = deque((r, s) for r, request in enumerate(requests) for s in range(len(request.seeds)))
        self.num_total = self.num_left = len(self.waiting)
        self.results: queue.SimpleQueue[GenerationOutput | Exception] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []
        self.is_closed = False
        self._changed = threading.Condition()

    def get(self) -> tuple[int, int] | None:
        """The next sample; waits while others in flight may be put back. None: the queue is closed."""
        with self._changed:
            while not self.waiting and not self.is_closed:
                self._changed.wait()
            return None if self.is_closed else self.waiting.popleft()

    def put_back(self, job: tuple[int, int]) -> None:
        with self._changed:
            self.waiting.appendleft(job)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
