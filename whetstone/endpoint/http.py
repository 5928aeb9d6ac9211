"""The HTTP server: one thread for each connection, JSON or server-sent events. No request is logged."""

import contextlib
import json
import secrets
import select
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from whetstone.endpoint.protocol import ApiError

MAX_BODY = 32 * 2**20
LOCAL = ("localhost", "127.0.0.1", "::1")
IDLE_S = 300  # a connection without a request is closed
IsGone = Callable[[], bool]


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Answer(Protocol):
    """The answer to a request that was understood."""

    @property
    def is_stream(self) -> bool: ...

    def body(self, is_gone: IsGone) -> dict[str, Any]:
        """Wait for all of it."""
        ...

    def events(self, is_gone: IsGone) -> Generator[dict[str, Any]]:
        """The chunks of a stream; where sampling fails, the last one is an error."""
        ...


class HttpServer(ThreadingHTTPServer):
    """`api_key`: None: none is asked for, but the request must name this machine's own address."""

    daemon_threads = True
    request_queue_size = 1024
    allow_reuse_address = True

    def __init__(self, handler: "type[Handler]", host: str, port: int, api_key: str | None) -> None:
        self.api_key = api_key
        self.is_local = host in LOCAL
        if ":" in host:
            self.address_family = socket.AF_INET6
        self.num_requests = self.num_open = 0
        self.changed = threading.Condition()
        self._connections: set[socket.socket] = set()
        super().__init__((host, port), handler)

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://[{host}]:{port}" if ":" in str(host) else f"http://{host!s}:{port}"

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request while it is answered."""
        with self.changed:
            self.num_requests += 1
            self.num_open += 1
        try:
            yield
        finally:
            with self.changed:
                self.num_open -= 1
                self.changed.notify_all()

    def wait_for_answers(self, timeout_s: float) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.num_open == 0, timeout_s)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self.changed:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self.changed:
            self._connections.discard(request)
            self.changed.notify_all()

    def close(self, timeout_s: float = 5.0) -> None:
        """Take no more connections, and end those that are open: clients keep them for later requests."""
        self.shutdown()
        self.server_close()
        with self.changed:
            for connection in self._connections:
                with contextlib.suppress(OSError):  # it ended by itself
                    connection.shutdown(socket.SHUT_RDWR)
            self.changed.wait_for(lambda: not self._connections, timeout_s)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections end as they please."""


class Handler(BaseHTTPRequestHandler):
    server: HttpServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "whetstone", ""
    disable_nagle_algorithm = True
    timeout = IDLE_S

    def log_message(self, format: str, *args: Any) -> None:
        """What clients ask is their own."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the library refuses by itself: no HTTP, another method, a header that is too long."""
        self.close_connection = True
        self.send_json(code, ApiError(code, message or "The request can't be read.").body())

    def do_GET(self) -> None:
        self._handle("GET")

    def do_POST(self) -> None:
        self._handle("POST")

    def do_PUT(self) -> None:
        self._handle("PUT")

    do_DELETE = do_PATCH = do_HEAD = do_OPTIONS = do_PUT

    def _handle(self, method: str) -> None:
        try:
            body = self._read_body()
            path = unquote(urlsplit(self.path).path).rstrip("/")
            if path != "/health":
                self._check_access()
            self.dispatch(method, path, body)
        except ApiError as error:
            self.send_json(error.status, error.body())
        except (ClientGone, ConnectionError, TimeoutError):
            self.close_connection = True

    def dispatch(self, method: str, path: str, body: bytes) -> None:
        """Answer one request, by `send_json` or `send_answer`."""
        raise NotImplementedError

    def send_answer(self, answer: Answer) -> None:
        with self.server.answering():
            if answer.is_stream:
                self._send_events(answer)
            else:
                self.send_json(200, answer.body(self._is_gone))

    def _read_body(self) -> bytes:
        length = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not length.isdecimal():
            self.close_connection = True
            raise ApiError(411, "Send the body with its Content-Length.")
        if int(length) > MAX_BODY:
            self.close_connection = True
            raise ApiError(413, f"The body is larger than {MAX_BODY // 2**20} MB: send less.")
        return self.rfile.read(int(length))

    def _check_access(self) -> None:
        """Without a key, a page of another site could make a browser send requests here, under its name."""
        key = self.server.api_key
        if key is not None:
            token = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
            if not secrets.compare_digest(token.encode(), key.encode()):
                raise ApiError(401, "Incorrect API key provided.", param=None, code="invalid_api_key")
        elif self.server.is_local:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
            if host not in LOCAL:
                raise ApiError(403, "This server answers requests to localhost only.", code="forbidden")

    def _is_gone(self) -> bool:
        """Whether the client has closed the connection."""
        poll = select.poll()  # `select` takes no descriptor above 1,023
        poll.register(self.connection, select.POLLIN)
        if not poll.poll(0):
            return False
        try:
            return self.connection.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True

    def _send_events(self, answer: Answer) -> None:
        with contextlib.closing(answer.events(self._is_gone)) as events:
            first = next(events, None)  # an error before the first token is an error of the request
            if first is not None and "error" in first:
                return self.send_json(503, first)
            self._stream_events(_event_texts(first, events))

    def _stream_events(self, texts: Iterator[str]) -> None:
        self.send_response(200)
        for name, value in (
            ("Content-Type", "text/event-stream; charset=utf-8"),
            ("Cache-Control", "no-store"),
            ("Transfer-Encoding", "chunked"),
        ):
            self.send_header(name, value)
        self.end_headers()
        for text in texts:
            self._write_chunk(text)
        self._write_chunk("data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _write_chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def send_json(self, status: int, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _event_texts(first: dict[str, Any] | None, rest: Iterator[dict[str, Any]]) -> Iterator[str]:
    if first is not None:
        yield f"data: {json.dumps(first)}\n\n"
    for event in rest:
        yield f"data: {json.dumps(event)}\n\n"
