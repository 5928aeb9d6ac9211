"""A hub of data sets on this machine: real HTTP, the endpoints that `datasets` and `huggingface_hub` call.

A repository is a folder of files; every revision that is asked for has the same content.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

MAIN = "a" * 40  # the commit that `main` stands for


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: Path
    asked: list[str]

    def log_message(self, format: str, *args: object) -> None:
        self.asked.append(f"{self.command} {unquote(self.path)}")

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        if path.startswith("datasets/"):
            repository, _, rest = path.removeprefix("datasets/").partition("/resolve/")
            revision, _, name = rest.partition("/")
            return self._file(repository, revision, name)
        parts = path.removeprefix("api/datasets/").split("/")
        repository, rest = "/".join(parts[:2]), parts[2:]
        if not path.startswith("api/datasets/") or not (self.root / repository).is_dir():
            return self._missing("RepoNotFound")
        revision = rest[1] if len(rest) > 1 else "main"
        if not rest or rest[0] == "revision":
            files = [{"rfilename": entry["path"]} for entry in self._entries(repository) if "size" in entry]
            return self._json(
                {"id": repository, "sha": _commit(revision), "siblings": files, "private": False}
            )
        if rest[0] == "tree":
            folder, is_deep = "/".join(rest[2:]), "recursive" in parse_qs(urlsplit(self.path).query)
            entries = [entry for entry in self._entries(repository) if _is_in(entry["path"], folder)]
            direct = [entry for entry in entries if "/" not in entry["path"].removeprefix(folder).strip("/")]
            return self._json(entries if is_deep else direct)
        self._missing("EntryNotFound")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        parts = unquote(self.path).strip("/").split("/")  # api/datasets/OWNER/NAME/paths-info/REVISION
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        asked = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
        self._json([entry for entry in self._entries("/".join(parts[2:4])) if entry["path"] in asked])

    def _entries(self, repository: str) -> list[dict[str, Any]]:
        folder = self.root / repository
        return [
            {
                "type": "file",
                "path": str(path.relative_to(folder)),
                "size": path.stat().st_size,
                "oid": _hash(path),
            }
            if path.is_file()
            else {"type": "directory", "path": str(path.relative_to(folder)), "oid": "0" * 40}
            for path in sorted(folder.rglob("*"))
        ]

    def _file(self, repository: str, revision: str, name: str) -> None:
        path = self.root / repository / name
        if not path.is_file():
            return self._missing(
                "EntryNotFound" if (self.root / repository).is_dir() else "RepoNotFound", revision
            )
        self._send(200, path.read_bytes(), {"ETag": f'"{_hash(path)}"', "X-Repo-Commit": _commit(revision)})

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _missing(self, code: str, revision: str = "main") -> None:
        self._send(404, b"{}", {"X-Error-Code": code, "X-Repo-Commit": _commit(revision)})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _commit(revision: str) -> str:
    return MAIN if revision == "main" else revision


def _hash(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


def _is_in(path: str, folder: str) -> bool:
    return not folder or path.startswith(f"{folder}/")


@contextmanager
def serve_hub(root: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of a hub whose repositories are `root`/OWNER/NAME, and what it was asked."""
    asked: list[str] = []
    handler = type("Handler", (_Handler,), {"root": root, "asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
