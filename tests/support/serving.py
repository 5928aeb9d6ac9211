"""A server of this process, and clients of it."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import openai

from whetstone.serving.api import Api
from whetstone.serving.engine_backend import EngineBackend
from whetstone.serving.http import ApiServer
from whetstone.serving.models import ServedModel


@dataclass(frozen=True)
class Running:
    served: ServedModel
    backend: EngineBackend
    server: ApiServer

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.server.url}/v1", api_key=key, max_retries=0, timeout=120)


@contextlib.contextmanager
def serving(served: ServedModel, *, api_key: str | None = None) -> Iterator[Running]:
    backend = served.start()
    server = ApiServer(Api(served, backend), backend, "127.0.0.1", 0, api_key)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield Running(served, backend, server)
    finally:
        backend.stop(0)
        server.close()
