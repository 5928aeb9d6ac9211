"""A stand-in for the hub's HTTP interface: create a repository, preupload, LFS batch and upload, commit.

It keeps what it gets, checks tokens and checksums, and answers as the hub does where huggingface_hub looks.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_standin"
USER = "ada"
LFS_BYTES = 1000  # larger files go by LFS; of a smaller hub than the real one, where it is 10 MB


@dataclass
class Hub:
    """The state of the stand-in."""

    address: str = ""
    private: dict[str, bool] = field(default_factory=dict)  # repository -> whether it is private
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)  # repository -> name -> content
    messages: list[str] = field(default_factory=list)  # of commits
    blobs: dict[str, bytes] = field(default_factory=dict)  # LFS: SHA-256 -> content
    requests: list[str] = field(default_factory=list)
    broken: str = ""  # paths that hold this text are answered with status 500


@contextmanager
def serve_hub() -> Iterator[Hub]:
    hub = Hub()
    handler = type("BoundHandler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

    do_PUT = do_POST

    def _answer(self, body: bytes) -> None:
        path = self.path.partition("?")[0]
        self.hub.requests.append(f"{self.command} {path}")
        status, document = self._route(path, body)
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status >= 400:
            self.send_header("X-Error-Message", str(document.get("error", "")))
        self.end_headers()
        self.wfile.write(data)

    def _route(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        if self.hub.broken and self.hub.broken in path:
            return 500, {"error": "Internal Error"}
        if upload := re.fullmatch(r"/upload/(\w+)", path):  # a signed address: no token
            if hashlib.sha256(body).hexdigest() != upload[1]:
                return 400, {"error": "checksum"}
            self.hub.blobs[upload[1]] = body
            return 200, {}
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid credentials in Authorization header"}
        if path == "/api/whoami-v2":
            return 200, {"type": "user", "name": USER, "orgs": []}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        repository = re.match(r"/(?:api/models/)?([\w.-]+/[\w-]+)(?:\.git)?(/.*)?$", path)
        if repository is None or repository[1] not in self.hub.private:
            return 404, {"error": "Repository not found"}
        return self._repository(repository[1], repository[2] or "", body)

    def _create(self, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        owner = request.get("organization") or USER
        name = f"{owner}/{request['name']}"
        url = f"{self.hub.address}/{name}"
        if owner != USER:
            return 403, {"error": f"You don't have the rights to create a model under {owner}"}
        if name in self.hub.private:
            return 409, {"error": "You already created this model repo", "url": url}
        self.hub.private[name] = request.get("visibility") == "private"
        self.hub.files[name] = {}
        return 200, {"url": url, "name": name}

    def _repository(self, name: str, rest: str, body: bytes) -> tuple[int, dict[str, Any]]:
        if rest in ("", "/revision/main"):
            return 200, {"id": name, "private": self.hub.private[name], "sha": "0" * 40, "siblings": []}
        if rest == "/preupload/main":
            files = json.loads(body)["files"]
            modes = ("regular", "lfs")
            return 200, {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": modes[file["size"] > LFS_BYTES],
                        "shouldIgnore": False,
                    }
                    for file in files
                ]
            }
        if rest == "/info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            upload = {
                e["oid"]: {"upload": {"href": f"{self.hub.address}/upload/{e['oid']}"}} for e in objects
            }
            return 200, {
                "transfer": "basic",
                "objects": [{**entry, "actions": upload[entry["oid"]]} for entry in objects],
            }
        if rest == "/commit/main":
            return self._commit(name, body)
        return 404, {"error": f"No route {rest}"}

    def _commit(self, name: str, body: bytes) -> tuple[int, dict[str, Any]]:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.hub.messages.append(value["summary"])
            elif line["key"] == "file":
                self.hub.files[name][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.hub.files[name][value["path"]] = self.hub.blobs[value["oid"]]
        url = f"{self.hub.address}/{name}/commit/{'1' * 40}"
        return 200, {"success": True, "commitOid": "1" * 40, "commitUrl": url}
