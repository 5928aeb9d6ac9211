"""A backend on an engine of this process: one thread samples, requests join and leave between its steps."""

import logging
import math
import queue
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field

from whetstone.endpoint.choice import TokenChunk
from whetstone.engines.base import (
    Engine,
    GenerationOutput,
    PartialOutput,
    Request,
    SamplingParams,
    generate_open,
)
from whetstone.engines.native import NativeEngine
from whetstone.rollout.collector import explain_engine_oom
from whetstone.serving.backend import BackendUnavailable, GenerationRequest
from whetstone.types import Finish

MAX_WAITING = 4096  # samples in the queue
MAX_FAILURES = 3  # of the engine, one after the other
logger = logging.getLogger("whetstone")


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the backend is doing."""

    num_samples: int  # running and waiting
    num_waiting: int
    num_tokens: int  # since the start


@dataclass(eq=False)
class EngineStream:
    """The samples of one request (`backend.TokenStream`)."""

    backend: "EngineBackend"
    request: GenerationRequest
    number: int | None = None  # of the engine's request; None: it has not been taken yet
    num_sent: dict[int, int] = field(default_factory=dict)  # sample -> tokens; unfinished samples only
    chunks: "queue.SimpleQueue[TokenChunk | str]" = field(default_factory=queue.SimpleQueue)  # or its end

    def read(self, timeout_s: float) -> list[TokenChunk]:
        chunks: list[TokenChunk] = []
        try:
            entry = self.chunks.get(timeout=timeout_s)
            while True:
                if isinstance(entry, str):
                    raise BackendUnavailable(entry)
                chunks.append(entry)
                entry = self.chunks.get_nowait()
        except queue.Empty:
            return chunks

    def cancel(self, sample: int | None = None) -> None:
        self.backend.cancel(self, list(self.num_sent) if sample is None else [sample])


class EngineBackend:
    """`engines.base.RequestStream` of an engine that samples until `close`."""

    def __init__(self, engine: Engine, *, max_length: int, num_sequences: int) -> None:
        self.max_length: int | None = max_length
        self.num_sequences = num_sequences
        self.max_prompt_length = max_length - 1
        self.reason = ""  # why there are no answers
        self._engine = engine
        self._changed = threading.Condition()
        self._pending: list[EngineStream] = []
        self._open: dict[int, EngineStream] = {}  # by number of the engine's request
        self._cancelled: list[tuple[int, int]] = []
        self._next_number = 0
        self._num_tokens = 0
        self._num_failures = 0
        self._is_closed = False
        self.is_stopping = False  # on request
        self.last_error: str | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest) -> EngineStream:
        stream = EngineStream(self, request, num_sent=dict.fromkeys(range(len(request.seeds)), 0))
        with self._changed:
            if self._is_closed:
                raise BackendUnavailable(self.reason)
            if self._load().num_waiting > MAX_WAITING:
                raise BackendUnavailable("Too many requests are waiting: try again later.")
            self._pending.append(stream)
            self._changed.notify_all()
        return stream

    def cancel(self, stream: EngineStream, samples: list[int]) -> None:
        with self._changed:
            for sample in samples:
                if stream.num_sent.pop(sample, None) is not None and stream.number is not None:
                    self._cancelled.append((stream.number, sample))
            if not stream.num_sent and stream.number is not None:
                self._open.pop(stream.number, None)
            elif not stream.num_sent and stream in self._pending:
                self._pending.remove(stream)

    def load(self) -> Load:
        with self._changed:
            return self._load()

    @property
    def is_alive(self) -> bool:
        return not self._is_closed

    def stop(self, timeout_s: float) -> None:
        """Take no new requests, wait for the others, and end what is left after the time."""
        self.is_stopping = True
        self._close("The server is shutting down.")
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._pending or self._open:
                if not self._changed.wait(deadline - time.monotonic()):
                    break
        self._fail_open()
        self._thread.join()

    def take(self, *, wait: bool) -> list[Request]:
        with self._changed:
            while wait and not self._pending and not self._is_closed:
                self._changed.wait()
            streams, self._pending = self._pending, []
            for stream in streams:
                stream.number = self._next_number
                self._open[stream.number] = stream
                self._next_number += 1
        return [_engine_request(stream.request) for stream in streams]

    def cancelled(self) -> list[tuple[int, int]]:
        with self._changed:
            samples, self._cancelled = self._cancelled, []
        return samples

    def _run(self) -> None:
        while not self._is_closed or self._pending:
            try:
                with explain_engine_oom():
                    for output in self._outputs():
                        self._deliver(output)
            except (
                Exception
            ) as error:  # whatever it was: the clients are told, and the next requests are tried
                logger.error("The engine failed: %s", "".join(traceback.format_exception(error)))
                self._num_failures += 1
                self.last_error = str(error)
                self.reason = "The engine failed: the log of the server has the reason."
                self._fail_open()
                if self._num_failures >= MAX_FAILURES and not self._can_sample():
                    self._close(self.reason)
                    self._fail_open()  # those that came meanwhile

    def _can_sample(self) -> bool:
        """Whether it was the requests that failed: the engine still samples a token."""
        probe = Request(prompt_ids=(3,), seeds=(0,))
        try:
            return bool(list(self._engine.generate([probe], SamplingParams(max_tokens=1))))
        except Exception:
            return False

    def _outputs(self) -> Iterator[GenerationOutput | PartialOutput]:
        with self._changed:
            self._next_number, self._cancelled = 0, []
        bound = SamplingParams(max_tokens=self.max_prompt_length)  # every request has its own
        if isinstance(self._engine, NativeEngine):
            return self._engine.stream([], bound, self)
        return generate_open(self._engine, [], bound, self)  # transformers' generate: no pieces

    def _deliver(self, output: GenerationOutput | PartialOutput) -> None:
        is_last = isinstance(output, GenerationOutput)
        result = output.completion if is_last else output
        finish: Finish | None = output.completion.finish if is_last else None
        with self._changed:
            stream = self._open.get(output.request)
            start = None if stream is None else stream.num_sent.get(output.sample)
            if stream is None or start is None:  # cancelled meanwhile
                return
            if not is_last and not stream.request.is_streamed:
                return
            count = len(result.token_ids)
            if any(map(math.isnan, result.logprobs[start:count])):  # the model's numbers, or an adapter's
                return self._fail(stream, "The model computes no probabilities (NaN) for this request.")
            self._num_tokens += count - start
            if is_last:
                self._num_failures = 0
                del stream.num_sent[output.sample]
                if not stream.num_sent:
                    del self._open[output.request]
                    self._changed.notify_all()
            else:
                stream.num_sent[output.sample] = count
        if is_last or count > start:
            chunk = TokenChunk(
                sample=output.sample,
                token_ids=tuple(result.token_ids[start:]),
                logprobs=tuple(result.logprobs[start:]),
                top=tuple(output.top[start:]),
                finish=finish,
            )
            stream.chunks.put(chunk)

    def _load(self) -> Load:
        pending = sum(len(stream.num_sent) for stream in self._pending)
        running = sum(len(stream.num_sent) for stream in self._open.values())
        waiting = max(0, pending + running - self.num_sequences)
        return Load(num_samples=pending + running, num_waiting=waiting, num_tokens=self._num_tokens)

    def _close(self, reason: str) -> None:
        with self._changed:
            self._is_closed, self.reason = True, reason
            self._changed.notify_all()

    def _fail_open(self) -> None:
        """Tell the clients of everything unfinished."""
        with self._changed:
            for stream in [*self._open.values(), *self._pending]:
                self._fail(stream, self.reason)
            self._pending = []

    def _fail(self, stream: EngineStream, reason: str) -> None:
        """No more of a request. Its number may be another's by the time that its client notices."""
        if stream.number is not None:
            self._cancelled.extend((stream.number, sample) for sample in stream.num_sent)
            self._open.pop(stream.number, None)
        stream.num_sent.clear()
        stream.chunks.put(reason)
        self._changed.notify_all()


def _engine_request(request: GenerationRequest) -> Request:
    return Request(
        prompt_ids=request.prompt_ids,
        seeds=request.seeds,
        sampling=request.sampling,
        adapter=request.adapter,
    )
