"""Generated HTTP requests over raw sockets: values at edges, malformed, of other sites, vanishing. Seeded."""

import json
import random
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EDGES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 0.5, 1e-6, 9e-7, 1e-40, 1e-320, 1e40, -0.0, 2**31, 2**53, 2**63, 10**40,
    float("nan"), float("inf"), "", "x", "0", "\x00", "\ud800", "\u202e", [], {}, [1], ["x"], [[]], [None],
    {"a": 1}, {"type": "text"}, "9" * 5000,
]  # fmt: skip
HOSTS = [
    "evil.example", "localhost.evil", "evil:80@localhost", "[", "]", "", "127.0.0.1:999999", "::1", "a\x00",
]  # fmt: skip
LENGTHS = [
    "-1", "+5", "0x10", "1e3", "", " ", "9" * 5000, "99999999999", "\xb2", "5, 5", "5\r\nContent-Length: 7",
]  # fmt: skip
HEADERS = [
    "Origin: null", "Origin: http://evil.example", "Origin: http://[", "Sec-Fetch-Site: cross-site",
    "Sec-Fetch-Site: same-site", "Sec-Fetch-Site: none", "Expect: 100-continue", "Connection: close",
    "Cookie: =;;", "Transfer-Encoding: chunked", "Upgrade: h2c", "no colon", ": no name", " folded",
    "X: " + "x" * 60_000, "X: " + "x" * 70_000, "Content-Type: text/plain", "Authorization: Bearer \xff",
    "Content-Type: multipart/form-data", "\r\n".join(f"X-{number}: 1" for number in range(120)),
]  # fmt: skip
LINES = [
    "GET http://[/ HTTP/1.1", "GET //[ HTTP/1.1", "nonsense", "GET /health", "POST /health", "GET / HTTP/9.9",
    "GET / HTTP/x", "GET / HTTP/1." + "9" * 30, "GET /" + "%" * 300 + " HTTP/1.1", "* * *", "PRI * HTTP/2.0",
    "GET /" + "x" * 70_000 + " HTTP/1.1", "GET /" + "a/" * 9_000 + " HTTP/1.1", "CONNECT a:1 HTTP/1.1",
    "GET /%00%ff%2f.. HTTP/1.1", "GET /" + "x" * 300 + ".js HTTP/1.1", "\x00\x01\x02 \xff HTTP/1.1",
]  # fmt: skip
METHODS = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "BREW"]
BODIES = [
    b"", b"{", b"[]", b"null", b"[" * 20_000, b'{"a":' * 900 + b"1" + b"}" * 900, b"\xff\xfe", b"\x00",
    b"1e999", b"9" * 5000, b'{"model": "\\ud800"}', b'"' + b"x" * 100_000 + b'"',
    b"[" + b"[]," * 50_000 + b"[]]",
]  # fmt: skip
Routes = Sequence[
    tuple[str, str, Mapping[str, Any] | None]
]  # method, path, fields of a body that is answered


@dataclass(frozen=True)
class Generated:
    data: bytes
    leaves_after: int | None  # bytes that are sent before the client vanishes; None: it stays
    reads: int | None  # bytes that are read before the client vanishes; None: all
    is_whole: bool  # a request that must get a status


def generate(rng: random.Random, routes: Routes, own_headers: Sequence[str]) -> Generated:
    method, path, fields = rng.choice(routes)
    line, headers = f"{method} {path} HTTP/1.1", list(own_headers)
    host, length = "Host: localhost", None
    body = b"" if fields is None else json.dumps(mutated(rng, fields)).encode()
    kind = rng.random()
    if kind < 0.1:
        body = rng.choice(BODIES)
    elif kind < 0.16 and body:
        cut = rng.randrange(len(body))
        body = rng.choice([body[:cut], body[:cut] + rng.randbytes(4) + body[cut:], body * 2])
    elif kind < 0.28:
        headers.insert(rng.randrange(len(headers) + 1), rng.choice(HEADERS))
    elif kind < 0.36:
        host = f"Host: {rng.choice(HOSTS)}"
    elif kind < 0.42:
        length = rng.choice(LENGTHS)
    elif kind < 0.5:
        line = rng.choice(LINES)
    elif kind < 0.54:
        line = f"{rng.choice(METHODS)} {path} HTTP/1.1"
    elif kind < 0.56:
        line = line.replace("HTTP/1.1", "HTTP/1.0")
    elif kind < 0.563:
        body = b" " * rng.randrange(1_000_000, 8_000_000)
    is_whole = length is None
    if body or length is not None:
        headers.append(f"Content-Length: {len(body) if length is None else length}")
    head = "\r\n".join([line, *([host] if rng.random() > 0.02 else []), *headers]) + "\r\n\r\n"
    data = head.encode("latin-1") + body
    vanishes = rng.random()
    if vanishes < 0.06:
        return Generated(data, rng.randrange(len(data)), 0, False)
    if vanishes < 0.15:
        return Generated(data, None, rng.choice([0, 0, 1, 300]), False)
    return Generated(data, None, None, is_whole)


def mutated(rng: random.Random, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Most of the fields, up to three of them with a value at an edge."""
    body = {name: value for name, value in fields.items() if rng.random() > 0.1}
    for name in rng.sample([*fields, "unknown"], min(rng.choice([0, 1, 1, 2, 3]), len(fields) + 1)):
        inner = fields.get(name)
        if isinstance(inner, dict) and inner and rng.random() < 0.7:
            body[name] = mutated(rng, inner)
        else:
            body[name] = rng.choice(EDGES)
    return body


def perform(request: Generated, address: tuple[str, int], leave: random.Random) -> int | None:
    """Send a request; the status of its answer, which must be whole. None: it vanished or needed none."""
    with socket.create_connection(address, timeout=120) as connection:
        try:
            connection.sendall(request.data[: request.leaves_after])
            if request.leaves_after is not None or request.reads is not None:
                if request.reads:
                    connection.recv(request.reads)
                time.sleep(leave.choice([0, 0, 0.002, 0.03]))
                if leave.random() < 0.5:  # by a reset
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return None
            if not request.is_whole:
                connection.shutdown(socket.SHUT_WR)
            return read_answer(connection, is_head=request.data.startswith(b"HEAD"))
        except OSError:
            if request.is_whole:
                raise
            return None


def read_answer(connection: socket.socket, *, is_head: bool) -> int | None:
    """The status; the rest of the answer is checked."""
    with connection.makefile("rb") as answer:
        line = answer.readline()
        while line.startswith(b"HTTP/1.1 100"):
            assert answer.readline() == b"\r\n"
            line = answer.readline()
        if not line:
            raise ConnectionError("no answer")
        match = re.fullmatch(rb"HTTP/1\.[01] (\d{3}) [^\r]*\r\n", line)
        assert match, line
        headers = dict(
            header.decode("latin-1").rstrip().split(": ", 1) for header in iter(answer.readline, b"\r\n")
        )
        if is_head:
            content = b"{}"
        elif headers.get("Transfer-Encoding") == "chunked":
            content = b"".join(_chunks(answer))
        elif "Content-Length" in headers:
            content = answer.read(int(headers["Content-Length"]))
            assert len(content) == int(headers["Content-Length"])
        else:
            content = answer.read()
        if headers["Content-Type"] == "application/json":
            json.loads(content)
        elif headers["Content-Type"].startswith("text/event-stream"):
            assert content.endswith(b"data: [DONE]\n\n")
        return int(match[1])


def _chunks(answer: Any) -> Iterator[bytes]:
    while size := int(answer.readline(), 16):
        yield answer.read(size)
        assert answer.readline() == b"\r\n"
    assert answer.readline() == b"\r\n"


@dataclass
class Innocent(threading.Thread):
    """A client that asks again and again for what is known, until `stop`."""

    ask: Callable[[int], Any]
    expected: Sequence[Any]
    stop: threading.Event
    count: int = 0
    wrong: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        while not self.stop.is_set():
            number = self.count % len(self.expected)
            try:
                got = self.ask(number)
            except Exception as error:
                got = repr(error)
            if got != self.expected[number]:
                self.wrong.append((number, got))
            self.count += 1


def bombard(
    address: tuple[str, int],
    count: int,
    seed: int,
    routes: Routes,
    own_headers: Sequence[str] = (),
    *,
    threads: int = 8,
) -> Counter[int | None]:
    """Statuses -> how many. A whole request without a whole answer raises, with what was sent."""

    def one(number: int) -> int | None:
        rng = random.Random(seed * 1_000_003 + number)
        request = generate(rng, routes, own_headers)
        try:
            return perform(request, address, rng)
        except Exception as error:
            raise AssertionError(
                f"request {number} of seed {seed}: {error!r} {request.data[:600]!r}"
            ) from error

    with ThreadPoolExecutor(threads) as pool:
        return Counter(pool.map(one, range(count)))


def usage(pid: int) -> dict[str, int]:
    """Threads, open files and resident MB of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    numbers = {name: int(re.search(rf"{name}:\s+(\d+)", status)[1]) for name in ("Threads", "VmRSS")}  # type: ignore[index]
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return {"threads": numbers["Threads"], "files": files, "mb": numbers["VmRSS"] // 1024}


def settled(pid: int, before: Mapping[str, int], limit_s: float = 60.0) -> dict[str, int]:
    """Usage once threads and files are back at what they were before, or after the time."""
    deadline = time.monotonic() + limit_s
    while True:
        now = usage(pid)
        if all(now[name] <= before[name] for name in ("threads", "files")) or time.monotonic() > deadline:
            return now
        time.sleep(0.1)
