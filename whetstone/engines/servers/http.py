"""A minimal JSON client over HTTP: one connection per call, a timeout, two kinds of error.

`Unreachable` (no answer, a broken one, 5xx): retry, or ask another server. `RequestRejected` (4xx): a retry
would not help.
"""

import json
import os
import socket
import threading
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit


class Unreachable(Exception):
    """The server did not answer, or said that it can't."""


class RequestRejected(Exception):
    """The server understood and said no."""

    def __init__(self, status: int, message: str):
        super().__init__(f"{message} (HTTP {status})")
        self.status = status


class HttpClient:
    """All calls to one server that are under way, so that they can be broken off together."""

    def __init__(self, url: str):
        self.url = url
        parts = urlsplit(url)
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host, self._port, self._prefix = parts.hostname or "", parts.port, parts.path.rstrip("/")
        key = os.environ.get("VLLM_API_KEY")  # the name under which vLLM itself looks for it
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._open: set[HTTPConnection] = set()
        self._lock = threading.Lock()

    @property
    def host(self) -> str:
        return self._host

    def get(self, path: str, *, timeout_s: float) -> Any:
        return self._call("GET", path, None, timeout_s)

    def post(self, path: str, body: Any, *, timeout_s: float) -> Any:
        return self._call("POST", path, json.dumps(body).encode(), timeout_s)

    def _call(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Any:
        connection = self._kind(self._host, self._port, timeout=timeout_s)
        with self._lock:
            self._open.add(connection)
        try:
            connection.request(method, self._prefix + path, body, self._headers)
            response = connection.getresponse()
            data = response.read()
        except TimeoutError:
            raise Unreachable(f"no answer to {path} within {timeout_s:g} s") from None
        except (OSError, HTTPException) as error:
            raise Unreachable(f"{path}: {error or type(error).__name__}") from None
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()
        text = data.decode("utf-8", errors="replace")
        if response.status >= 500:
            raise Unreachable(f"{path}: HTTP {response.status} {_message(text)}")
        if response.status >= 400:
            raise RequestRejected(response.status, _message(text))
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text  # some endpoints answer in words, or with nothing

    def cancel_all(self) -> None:
        """End every call under way; whoever waits for one gets `Unreachable`. The server sees that nobody
        wants the answer any more.
        """
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            sock = connection.sock
            if sock is not None:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:  # it ended by itself in the meantime
                    continue


def _message(text: str) -> str:
    """What an error answer says, in one line: OpenAI's form, FastAPI's, or plain text."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError:
        data = text
    for key in ("error", "message", "detail"):
        if isinstance(data, dict) and key in data:
            data = data[key]
    return " ".join(str(data).split())[:300] or "without a word"


def own_address(towards: str) -> str:
    """The address of this machine as a server at `towards` sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # sends nothing: it only chooses a route
        return probe.getsockname()[0]


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]
