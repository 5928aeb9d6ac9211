"""The server behind the page: static files, JSON of run folders, and events while a run is going.

Only what `find_runs` names can be read. On another address than this machine's own it asks for a token.
Nothing is written. Talk samples from a checkpoint when a page of this server asks for it.
"""

import contextlib
import json
import secrets
import threading
from collections.abc import Callable, Iterator
from http.cookies import CookieError, SimpleCookie
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote

from whetstone.diagnosis.explain import diagnose, load_history
from whetstone.endpoint.http import Handler, HttpServer
from whetstone.endpoint.protocol import ApiError
from whetstone.errors import UserError
from whetstone.files import json_safe
from whetstone.watch import runs
from whetstone.watch.talk import Talk
from whetstone.watch.tokens import tokens

TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
FOLLOW_S = 0.5  # between two looks at a run folder
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class WatchServer(HttpServer):
    """Serves the runs below `root`; `token` is None on this machine's own address."""

    def __init__(self, root: Path, host: str = "127.0.0.1", port: int = 0) -> None:
        self.root = root
        self.closing = threading.Event()
        self.talk = Talk(lambda: runs.find_runs(root))
        super().__init__(WatchHandler, host, port, None)
        self.token = None if self.is_local else secrets.token_urlsafe(16)

    @property
    def address(self) -> str:
        return self.url if self.token is None else f"{self.url}/?token={self.token}"

    def shutdown(self) -> None:
        self.closing.set()
        super().shutdown()

    def server_close(self) -> None:
        self.talk.close()
        super().server_close()


class WatchHandler(Handler):
    server: WatchServer
    max_body = 1_000_000

    def check_access(self, url: SplitResult) -> None:
        super().check_access(url)
        token = self.server.token
        if token is not None:
            try:
                cookie = SimpleCookie(self.headers.get("Cookie", "")).get("token")
            except CookieError:
                cookie = None
            sent = [*parse_qs(url.query).get("token", []), *([cookie.value] if cookie else [])]
            if not any(secrets.compare_digest(value.encode(), token.encode()) for value in sent):
                raise ApiError(403, "This address needs its token.")
        # Talk: a browser names the page that asks, and forms of other sites send no JSON.
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip()
        if self.command == "POST" and ("Origin" not in self.headers or kind != "application/json"):
            raise ApiError(403, "Only the page of this server may ask.")

    def dispatch(self, url: SplitResult) -> None:
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        if self.command == "POST" and url.path == "/api/talk":
            self._send_answer()
        elif self.command == "POST" and url.path == "/api/talk/stop":
            self.server.talk.stop()
            self.send_json(200, {})
        elif self.command != "GET":
            raise ApiError(404 if self.command == "POST" else 405, "There is nothing to ask here.")
        elif parts[0] == "api":
            self._send_api(parts[1:], url.query)
        else:
            self._send_static(parts)

    def refuse(self, error: ApiError) -> None:
        self.send(error.status, error.message.encode(errors="replace"), "text/plain; charset=utf-8")

    def more_headers(self, status: int) -> dict[str, str]:
        if self.server.token is None or status != 200:
            return HEADERS
        return HEADERS | {"Set-Cookie": f"token={self.server.token}; HttpOnly; SameSite=Strict; Path=/"}

    def _send_answer(self) -> None:
        """A line of JSON for each event, while the answer is sampled."""
        try:
            document = json.loads(self.read_body())
        except (ValueError, RecursionError):
            raise ApiError(400, "The request is no JSON.") from None
        with contextlib.closing(self.server.talk.answer(document)) as events:
            self.send_stream(
                "application/x-ndjson", (f"{json.dumps(json_safe(event))}\n" for event in events)
            )

    def _send_api(self, parts: list[str], query: str) -> None:
        known = runs.find_runs(self.server.root)
        if parts == ["runs"]:
            summaries = [{"name": name, **runs.summary(folder)} for name, folder in known.items()]
            self.send_json(200, {"runs": summaries, "grids": _grids(self.server.root, known)})
        elif parts == ["events"]:
            names = [name for name in parse_qs(query).get("run", []) if name in known]
            self.send_stream("text/event-stream", self._events({name: known[name] for name in names}))
        elif len(parts) == 2 and parts[0] == "talk" and parts[1] in known:
            self.send_json(200, self.server.talk.state(known[parts[1]]))
        elif (
            len(parts) == 4
            and parts[0] == "runs"
            and parts[1] in known
            and parts[2] in (*READERS, "problems")
        ):
            self._send_document(known[parts[1]], parts[2], parts[3])
        else:
            raise ApiError(404, "There is no such run.")

    def _send_document(self, folder: Path, kind: str, name: str) -> None:
        """A document by its step; a problem by its id."""
        content = None
        if kind == "problems":
            content = runs.problem(folder, name)
        elif name.isdecimal() and len(name) < 16:
            content = READERS[kind](folder, int(name))
        if content is None:
            raise ApiError(404, "The run has no such file.")
        self.send_json(200, content)

    def _send_static(self, parts: list[str]) -> None:
        name = "index.html" if parts == [""] else parts[-1]
        pages = {page.name: page for page in (files("whetstone.watch") / "static").iterdir()}
        if len(parts) > 1 or name not in pages or Path(name).suffix not in TYPES:
            raise ApiError(404, "There is no such page.")
        self.send(200, pages[name].read_bytes(), f"{TYPES[Path(name).suffix]}; charset=utf-8")

    def _events(self, folders: dict[str, Path]) -> Iterator[str]:
        """Server-sent events until the page is closed: what is new in each of these runs."""
        followers = {name: runs.Follower(folder) for name, folder in folders.items()}
        while not self.server.closing.is_set():
            for name, follower in followers.items():
                if changes := follower.changes():
                    rows = changes.pop("rows", [])  # finite numbers, as they were read
                    event = {"run": name, **json_safe(changes), **({"rows": rows} if rows else {})}
                    yield f"data: {json.dumps(event)}\n\n"
            yield ": still here\n\n"
            self.server.closing.wait(FOLLOW_S)

    def send_json(self, status: int, value: Any) -> None:
        content = json.dumps(json_safe(value), ensure_ascii=False).encode(errors="replace")
        self.send(status, content, "application/json")


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
