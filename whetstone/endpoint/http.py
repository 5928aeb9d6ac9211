"""The HTTP server of `whet serve`, `whet watch` and the agents' endpoint: one thread for each connection.

Its rules hold for all three. The headers decide who may ask, before a body is read. Bodies, connections and
the time that a request takes to arrive are bounded. What can't be read gets 400, and a client that vanishes
is no event. No request is logged.
"""

import contextlib
import io
import json
import logging
import re
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Protocol
from urllib.parse import SplitResult, urlsplit

from whetstone.endpoint.protocol import ApiError
from whetstone.errors import UserError

MAX_BODY = 32 * 2**20
MAX_BODIES = 4 * MAX_BODY  # of all requests that are arriving or being read
LOCAL = ("localhost", "127.0.0.1", "::1")
LOCAL_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?", re.IGNORECASE)
IDLE_S = 300.0  # a connection without a request is closed, and one whose client does not read
ARRIVAL_S = 60.0  # for the headers of a request, and for its body
LINGER_S = 1.0  # for a client to read the answer to a request that was not read whole
IsGone = Callable[[], bool]
logger = logging.getLogger("whetstone")


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
        self.num_bytes = 0  # of bodies
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

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:  # too many open files: the connection waits
            time.sleep(0.1)
            raise

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
        """Connections end as they please; anything else is a bug."""
        if not isinstance(sys.exception(), OSError):
            logger.exception("A connection failed.")


class _Arriving(io.RawIOBase):
    """What a client sends, up to a deadline: a byte now and then does not keep a thread."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.deadline = connection, 0.0

    def wait(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        remaining = self.deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        self.connection.settimeout(remaining)
        try:
            return self.connection.recv_into(buffer)
        finally:
            self.connection.settimeout(IDLE_S)


class Handler(BaseHTTPRequestHandler):
    server: HttpServer
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # older ones have no status
    server_version, sys_version = "whetstone", ""
    disable_nagle_algorithm = True
    timeout = IDLE_S
    max_body: ClassVar[int] = MAX_BODY
    _num_unread = 0  # bytes of the body
    _num_held = 0  # bytes of the body that the server has
    _has_begun = False  # the answer

    def setup(self) -> None:
        super().setup()
        self._arriving = _Arriving(self.connection)
        self.rfile = self._reader = io.BufferedReader(self._arriving)

    def handle_one_request(self) -> None:
        self._arriving.wait(IDLE_S)
        self._reader.peek(1)
        self._arriving.wait(ARRIVAL_S)
        super().handle_one_request()

    def finish(self) -> None:
        """Close the connection so that its client can read the answer, whatever it is still sending."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self._arriving.wait(LINGER_S)
            while self.rfile.read1(65_536):
                pass
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """What clients ask is their own."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the library refuses by itself: no HTTP, another method, a header that is too long."""
        self.close_connection = True
        self.refuse(ApiError(code, message or "The request can't be read."))

    def _handle(self) -> None:
        self._has_begun = False
        try:
            url = self._read_head()
            if url.path != "/health":
                self.check_access(url)
            self.dispatch(url)
        except (ClientGone, ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception as error:
            refusal = _refusal(error)
            if self._has_begun:  # in the middle of an answer
                self.close_connection = True
            else:
                with contextlib.suppress(OSError):
                    self.refuse(refusal)
        finally:
            self._release_body()

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_OPTIONS = _handle

    def dispatch(self, url: SplitResult) -> None:
        """Answer one request, by a method `send_...`; `read_body` has its body."""
        raise NotImplementedError

    def refuse(self, error: ApiError) -> None:
        self.send_json(error.status, error.body())

    def more_headers(self, status: int) -> dict[str, str]:
        """Headers of every answer."""
        return {}

    def _read_head(self) -> SplitResult:
        """The address of the request; and the length of its body is known."""
        if "Transfer-Encoding" in self.headers:
            self.close_connection = True
            raise ApiError(411, "Send the body with its Content-Length.")
        try:
            (length,) = set(self.headers.get_all("Content-Length", ["0"]))
            if not (length.isascii() and length.isdecimal()):
                raise ValueError
            self._num_unread = int(length[:18])
            return urlsplit(self.path)
        except ValueError:
            self.close_connection = True
            raise ApiError(400, "The address or the Content-Length of the request can't be read.") from None

    def read_body(self) -> bytes:
        """The body, once it is known that somebody wants it."""
        length = self._num_unread
        if length > self.max_body:
            raise ApiError(413, f"The body is larger than {self.max_body:,} bytes: send less.")
        self._arriving.wait(ARRIVAL_S)
        parts: list[bytes] = []
        while self._num_unread:
            try:
                parts.append(self.rfile.read1(min(self._num_unread, 65_536)))
            except TimeoutError:
                raise ApiError(408, f"The body did not arrive within {ARRIVAL_S:g} s.") from None
            if not parts[-1]:
                raise ApiError(400, "The body is shorter than its Content-Length.")
            self._hold_body(len(parts[-1]))
        return b"".join(parts)

    def _hold_body(self, count: int) -> None:
        with self.server.changed:
            is_full = self.server.num_bytes + count > MAX_BODIES
            if not is_full:
                self.server.num_bytes += count
        if is_full:
            raise ApiError(503, "Too much is being sent: try again later.", kind="server_error")
        self._num_held += count
        self._num_unread -= count

    def _release_body(self) -> None:
        with self.server.changed:
            self.server.num_bytes -= self._num_held
        self._num_held = 0

    def check_access(self, url: SplitResult) -> None:
        """Without a key, a page of another site could make a browser send requests here, under its name."""
        key = self.server.api_key
        if key is not None:
            token = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
            if not secrets.compare_digest(token.encode(), key.encode()):
                raise ApiError(401, "Incorrect API key provided.", param=None, code="invalid_api_key")
            return
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if self.server.is_local and not LOCAL_HOST.fullmatch(host):
            raise ApiError(403, "This server answers requests to localhost only.", code="forbidden")
        is_link = self.command == "GET" and self.headers.get("Sec-Fetch-Mode") == "navigate"
        is_foreign = self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
        if origin not in (None, f"http://{host}", f"https://{host}") or (is_foreign and not is_link):
            raise ApiError(403, "Requests from pages of other sites are refused.", code="forbidden")

    def send_answer(self, answer: Answer) -> None:
        self._release_body()
        with self.server.answering():
            if not answer.is_stream:
                return self.send_json(200, answer.body(self._is_gone))
            with contextlib.closing(answer.events(self._is_gone)) as events:
                first = next(events, None)  # an error before the first token is an error of the request
                if first is not None and "error" in first:
                    return self.send_json(503, first)
                self.send_stream("text/event-stream; charset=utf-8", _event_texts(first, events))

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

    def send_stream(self, kind: str, texts: Iterator[str]) -> None:
        """In chunks; to an old client until the connection ends."""
        is_chunked = self.request_version != "HTTP/1.0"
        self.close_connection = self.close_connection or not is_chunked
        headers = {"Content-Type": kind, "Cache-Control": "no-store"}
        self._send_headers(200, headers | ({"Transfer-Encoding": "chunked"} if is_chunked else {}))
        for text in texts:
            data = text.encode(errors="replace")
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data) if is_chunked else data)
        if is_chunked:
            self.wfile.write(b"0\r\n\r\n")

    def send_json(self, status: int, value: Any) -> None:
        self.send(status, json.dumps(value).encode(), "application/json")

    def send(self, status: int, content: bytes, kind: str) -> None:
        self._send_headers(status, {"Content-Type": kind, "Content-Length": str(len(content))})
        if self.command != "HEAD":
            self.wfile.write(content)

    def _send_headers(self, status: int, headers: dict[str, str]) -> None:
        self._has_begun = True
        if self._num_unread:  # it would be read as the next request
            self.close_connection = True
        self.send_response(status)
        for name, value in (self.more_headers(status) | headers).items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()


def _refusal(error: Exception) -> ApiError:
    """What the client of a request is told."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return ApiError(400, str(error))
    if isinstance(error, RecursionError):
        return ApiError(400, "The body is nested too deeply.")
    if not isinstance(error, OSError):
        logger.error("A request failed, which is a bug.", exc_info=error)
    return ApiError(500, "The server failed at this request.", kind="server_error")


def _event_texts(first: dict[str, Any] | None, rest: Iterator[dict[str, Any]]) -> Iterator[str]:
    if first is not None:
        yield f"data: {json.dumps(first)}\n\n"
    for event in rest:
        yield f"data: {json.dumps(event)}\n\n"
    yield "data: [DONE]\n\n"
