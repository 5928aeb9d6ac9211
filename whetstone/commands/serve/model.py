"""Serve a model: load it, answer until Ctrl-C or SIGTERM, and print what the server is doing."""

import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from whetstone.errors import UserError
from whetstone.terminal.display import long_command
from whetstone.terminal.stages import stage
from whetstone.terminal.text import counted

if TYPE_CHECKING:
    from whetstone.serving.engine_backend import EngineBackend
    from whetstone.serving.http import ApiServer
    from whetstone.serving.models import ServedModel

REPORT_S = 10.0  # between two lines
DRAIN_S = 5.0  # for answers that are being sampled when the server ends
WARM_UP_TOKENS = 4
SWITCH_S = 0.0005  # a thread that writes answers does not hold up the one that samples


def serve_model(
    name: str,
    *,
    host: str,
    port: int,
    api_key: str | None,
    adapters: Mapping[str, str],
    served_name: str | None,
    system: str | None,
    max_length: int | None,
    max_sequences: int | None,
    device: str,
) -> None:
    try:  # before a large model is loaded
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except (OSError, OverflowError) as error:
        raise _unusable(host, port, error) from None
    with long_command():
        with stage("loading torch"):
            from whetstone.serving.models import ServedModel
        with stage("loading the model"):
            served = ServedModel.open(
                name,
                adapters=adapters,
                served_name=served_name,
                system=system,
                device=device,
                max_length=max_length,
                max_sequences=max_sequences,
            )
    backend = served.start()
    try:
        _serve(served, backend, host, port, api_key)
    finally:
        backend.stop(0.0)  # the thread that samples must end before the interpreter does


def _serve(
    served: "ServedModel", backend: "EngineBackend", host: str, port: int, api_key: str | None
) -> None:
    from whetstone.serving.api import Api
    from whetstone.serving.http import ApiServer

    try:
        server = ApiServer(Api(served, backend), backend, host, port, api_key)
    except (OSError, OverflowError) as error:
        raise _unusable(host, port, error) from None
    with long_command(), stage("first tokens"):
        warm_up(backend)
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell has put us into the background
        signal.signal(number, _end)
    print(f"{', '.join(served.names)} at {server.url}/v1   (Ctrl-C ends this)", flush=True)
    length = f"{served.max_length:,} tokens of prompt and answer at most"
    print(f"{counted(backend.num_sequences, 'answer')} at once, {length}.", flush=True)
    if api_key is None and not server.is_local:
        print("Whoever reaches this address can use the model: set --api-key.", file=sys.stderr, flush=True)
    sys.setswitchinterval(SWITCH_S)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        report(server, backend)
    except KeyboardInterrupt:
        print("Ending: answers that are being sampled have 5 s.", flush=True)
        backend.stop(DRAIN_S)
        server.wait_for_answers(DRAIN_S)
    finally:
        server.close()
    if not backend.is_stopping:
        raise UserError(f"{backend.reason} The server ends.")


def _end(*_: object) -> None:
    """At the first signal. A second Ctrl-C ends the process at once; SIGTERM often comes twice."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _unusable(host: str, port: int, error: Exception) -> UserError:
    reason = error.strerror if isinstance(error, OSError) else error
    return UserError(f"{host}:{port} can't be used ({reason}): choose another --port.")


def warm_up(backend: "EngineBackend") -> None:
    """One short answer: what is built at the first token is there for the first client."""
    from whetstone.engines.base import SamplingParams
    from whetstone.serving.backend import BackendUnavailable, GenerationRequest

    sampling = SamplingParams(max_tokens=WARM_UP_TOKENS, ignore_eos=True)
    stream = backend.submit(GenerationRequest(prompt_ids=(3,), seeds=(0,), sampling=sampling))
    try:
        while not any(chunk.finish for chunk in stream.read(1.0)):
            pass
    except BackendUnavailable as error:
        raise UserError(f"The model can't be sampled from: {backend.last_error or error}") from None


def report(server: "ApiServer", backend: "EngineBackend") -> None:
    """A line every `REPORT_S` seconds with requests; returns if the engine fails for good."""
    before, started = backend.load().num_tokens, time.monotonic()
    while backend.is_alive:
        time.sleep(0.5)
        seconds = time.monotonic() - started
        if seconds < REPORT_S:
            continue
        load = backend.load()
        speed = (load.num_tokens - before) / seconds
        if load.num_samples or speed:
            print(
                f"{time.strftime('%H:%M:%S')} {counted(server.num_open, 'request')} in flight, "
                f"{load.num_samples - load.num_waiting} answers sampled at once, {load.num_waiting} waiting, "
                f"{speed:,.0f} tokens/s, {server.num_requests:,} requests so far",
                flush=True,
            )
        before, started = load.num_tokens, time.monotonic()
