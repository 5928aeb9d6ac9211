"""A minimal JSON client over HTTP: one connection per call, a timeout, two kinds of error."""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

HEALTH_TIMEOUT_S = 5.0  # SGLang samples a token for it, and looks for it once a second
CONTROL_TIMEOUT_S = 60.0  # short requests
PUSH_TIMEOUT_S = 1800.0  # a large model over a slow disk


class Unreachable(Exception):
    """No answer, a broken one, or 5xx: retry, or ask another server."""


class RequestRejected(Exception):
    """4xx: a retry would not help."""

    def __init__(self, status: int, message: str):
        super().__init__(f"{message} (HTTP {status})")
        self.status = status


class HttpClient:
    """The client of one server; all calls that are under way can be cancelled together."""

    def __init__(self, url: str):
        self.url = url
        parts = urlsplit(url)
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self.host, self._port, self._prefix = parts.hostname or "", parts.port, parts.path.rstrip("/")
        key = os.environ.get("VLLM_API_KEY")  # the name under which vLLM itself looks for it
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._open: dict[HTTPConnection, int] = {}  # with the thread that waits for it
        self._lock = threading.Lock()
        self.has_cancelled = False  # calls that the server may still be busy with

    def get(self, path: str, *, timeout_s: float = CONTROL_TIMEOUT_S) -> Any:
        return self._call("GET", path, None, timeout_s)

    def is_healthy(self) -> bool:
        try:
            self.get("/health", timeout_s=HEALTH_TIMEOUT_S)
        except (Unreachable, RequestRejected):
            return False
        return True

    def post(self, path: str, body: Any, timeout_s: float = CONTROL_TIMEOUT_S) -> Any:
        return self._call("POST", path, json.dumps(body).encode(), timeout_s)

    def _call(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Any:
        connection = self._kind(self.host, self._port, timeout=timeout_s)
        with self._lock:
            self._open[connection] = threading.get_ident()
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
                self._open.pop(connection, None)
            connection.close()
        text = data.decode("utf-8", errors="replace")
        if response.status >= 500:
            raise Unreachable(f"{path}: HTTP {response.status} {_message(text)}")
        if response.status >= 400:
            raise RequestRejected(response.status, _message(text))
        return _parse(text)

    @contextlib.contextmanager
    def posting(self, path: str, body: Any) -> Iterator[None]:
        """Post while the body of the `with` runs, for transfers that both sides take part in."""
        with ThreadPoolExecutor(max_workers=1) as pool:
            response = pool.submit(self.post, path, body, PUSH_TIMEOUT_S)
            yield
            response.result()

    def cancel_all(self) -> None:
        """Close every connection: callers get `Unreachable`, and the server stops computing answers."""
        self.cancel(None)

    def cancel(self, thread: int | None) -> None:
        """The same for the connections of one thread; None: of all."""
        with self._lock:
            connections = [connection for connection, owner in self._open.items() if thread in (None, owner)]
        for connection in connections:
            if (sock := connection.sock) is not None:
                self.has_cancelled = True
                with contextlib.suppress(OSError):  # it ended by itself in the meantime
                    sock.shutdown(socket.SHUT_RDWR)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text  # some endpoints answer with plain text, or with nothing


def _message(text: str) -> str:
    """What an error answer says, in one line: OpenAI's form, FastAPI's, or plain text."""
    data = _parse(text)
    for key in ("error", "message", "error_message", "detail"):
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
