"""The server behind the page: static files, JSON of run folders, and events while a run is going.

Only what `find_runs` names can be read. On another address than this machine's own it asks for a token.
Nothing is written. Talk samples from a checkpoint when a page of this server asks for it.
"""

import contextlib
import json
import secrets
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from whetstone.diagnosis.explain import diagnose, load_history
from whetstone.errors import UserError
from whetstone.files import json_safe
from whetstone.watch import runs
from whetstone.watch.talk import Talk
from whetstone.watch.tokens import tokens

TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
LOCAL = ("localhost", "127.0.0.1", "[::1]")
FOLLOW_S = 0.5  # between two looks at a run folder
MAX_BODY = 1_000_000  # bytes of a request
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class WatchServer(ThreadingHTTPServer):
    """Serves the runs below `root`; `token` is None on this machine's own address."""

    daemon_threads = True

    def __init__(self, root: Path, host: str = "127.0.0.1", port: int = 0) -> None:
        self.root = root
        self.token = None if host in ("127.0.0.1", "::1", "localhost") else secrets.token_urlsafe(16)
        self.closing = threading.Event()
        self.talk = Talk(lambda: runs.find_runs(root))
        super().__init__((host, port), Handler)

    @property
    def address(self) -> str:
        host, port = self.server_address[:2]
        query = "" if self.token is None else f"/?token={self.token}"
        return f"http://{host!s}:{port}{query}"

    def shutdown(self) -> None:
        self.closing.set()
        super().shutdown()

    def server_close(self) -> None:
        self.talk.close()
        super().server_close()


class Handler(BaseHTTPRequestHandler):
    server: WatchServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal belongs to the run."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if not self._is_allowed(url.query):
            return self._send(HTTPStatus.FORBIDDEN, b"This address needs its token.", "text/plain")
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        try:
            if parts[0] != "api":
                self._send_static(parts)
            else:
                self._send_api(parts[1:], url.query)
        except (BrokenPipeError, ConnectionResetError):  # the page was closed
            self.close_connection = True

    def do_POST(self) -> None:
        """Talk. Only a page of this server may ask: another site's can make a browser send a request."""
        url = urlsplit(self.path)
        self.close_connection = True  # a body that was not read is not the next request
        if not self._is_allowed(url.query) or not self._is_own_page():
            return self._send(HTTPStatus.FORBIDDEN, b"Only the page of this server may ask.", "text/plain")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY:
            return self._send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, b"The request is too long.", "text/plain")
        try:
            document = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            return self._send(HTTPStatus.BAD_REQUEST, b"The request is no JSON.", "text/plain")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the page was closed
            if url.path == "/api/talk":
                self._send_answer(document)
            elif url.path == "/api/talk/stop":
                self.server.talk.stop()
                self._send_json({})
            else:
                self._send(HTTPStatus.NOT_FOUND, b"There is nothing to ask here.", "text/plain")

    def _is_own_page(self) -> bool:
        """By headers that scripts can't set, and a content type that no form of another site sends."""
        origin, kind = self.headers.get("Origin", ""), self.headers.get("Content-Type", "")
        return (
            urlsplit(origin).netloc == self.headers.get("Host", "") != ""
            and self.headers.get("Sec-Fetch-Site", "same-origin") == "same-origin"
            and kind.partition(";")[0].strip() == "application/json"
        )

    def _send_answer(self, document: Any) -> None:
        """A line of JSON for each event, while the answer is sampled."""
        self._begin_stream("application/x-ndjson")
        with contextlib.closing(self.server.talk.answer(document)) as events:
            for event in events:
                self.wfile.write(json.dumps(json_safe(event)).encode() + b"\n")
                self.wfile.flush()

    def _begin_stream(self, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        for name, value in (HEADERS | {"Content-Type": kind, "Connection": "close"}).items():
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = True

    def _send_api(self, parts: list[str], query: str) -> None:
        known = runs.find_runs(self.server.root)
        if parts == ["runs"]:
            self._send_json(
                {
                    "runs": [{"name": name, **runs.summary(folder)} for name, folder in known.items()],
                    "grids": _grids(self.server.root, known),
                }
            )
        elif parts == ["events"]:
            names = [name for name in parse_qs(query).get("run", []) if name in known]
            self._send_events({name: known[name] for name in names})
        elif len(parts) == 2 and parts[0] == "talk" and parts[1] in known:
            self._send_json(self.server.talk.state(known[parts[1]]))
        elif (
            len(parts) == 4
            and parts[0] == "runs"
            and parts[1] in known
            and parts[2] in (*READERS, "problems")
        ):
            self._send_document(known[parts[1]], parts[2], parts[3])
        else:
            self._send(HTTPStatus.NOT_FOUND, b"There is no such run.", "text/plain")

    def _send_document(self, folder: Path, kind: str, name: str) -> None:
        """A document by its step; a problem by its id."""
        content = None
        if kind == "problems":
            content = runs.problem(folder, name)
        elif name.isdecimal() and len(name) < 16:
            content = READERS[kind](folder, int(name))
        if content is None:
            return self._send(HTTPStatus.NOT_FOUND, b"The run has no such file.", "text/plain")
        self._send_json(content)

    def _is_allowed(self, query: str) -> bool:
        """A page of another site can make a browser send requests here, under a name of its own."""
        token = self.server.token
        if token is None:
            host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
            return host in LOCAL
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get("token")
        except CookieError:
            cookie = None
        tokens = [*parse_qs(query).get("token", []), *([cookie.value] if cookie else [])]
        return any(secrets.compare_digest(value.encode(), token.encode()) for value in tokens)

    def _send_static(self, parts: list[str]) -> None:
        name = "index.html" if parts == [""] else parts[-1]
        path = files("whetstone.watch") / "static" / name
        if len(parts) > 1 or "/" in name or Path(name).suffix not in TYPES or not path.is_file():
            return self._send(HTTPStatus.NOT_FOUND, b"There is no such page.", "text/plain")
        self._send(HTTPStatus.OK, path.read_bytes(), TYPES[Path(name).suffix])

    def _send_events(self, folders: dict[str, Path]) -> None:
        """Server-sent events until the page is closed: what is new in each of these runs."""
        self._begin_stream("text/event-stream")
        followers = {name: runs.Follower(folder) for name, folder in folders.items()}
        while not self.server.closing.is_set():
            for name, follower in followers.items():
                if changes := follower.changes():
                    rows = changes.pop("rows", [])  # finite numbers, as they were read
                    event = {"run": name, **json_safe(changes), **({"rows": rows} if rows else {})}
                    self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.write(b": still here\n\n")
            self.wfile.flush()
            self.server.closing.wait(FOLLOW_S)

    def _send_json(self, value: Any) -> None:
        content = json.dumps(json_safe(value), ensure_ascii=False).encode(errors="replace")
        self._send(HTTPStatus.OK, content, "application/json")

    def _send(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if self.server.token is not None and status is HTTPStatus.OK:
            self.send_header("Set-Cookie", f"token={self.server.token}; HttpOnly; SameSite=Strict; Path=/")
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _grids(root: Path, known: dict[str, Path]) -> list[dict[str, Any]]:
    names = {folder: name for name, folder in known.items()}
    grids = {name: runs.grid(folder, names) for name, folder in runs.find_grids(root).items()}
    return [{"name": name, **grid} for name, grid in grids.items() if grid is not None]


def _findings(folder: Path, step: int) -> list[dict[str, str]]:
    """What `whet explain` says; nothing before the first step. `step` only makes the page ask again."""
    del step
    try:
        verdicts = diagnose(*load_history(folder))
    except UserError:
        return []
    return [
        {"severity": v.severity.name.lower(), "title": v.title, "evidence": v.evidence, "remedy": v.remedy}
        for v in verdicts
    ]


# By step; a problem is read by its id.
READERS: dict[str, Callable[[Path, int], Any]] = {
    "completions": runs.completions,
    "evaluations": runs.evaluation,
    "tasks": runs.tasks,
    "tokens": tokens,
    "findings": _findings,
}
