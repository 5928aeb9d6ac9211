"""The process of `whet watch` under generated requests, beside two pages that follow a run."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests.support.http_fuzz import Routes, bombard, settled

TALK = {
    "run": "no run", "messages": [{"role": "user", "content": "x"}], "temperature": 1.0, "max_tokens": 5,
    "system": "s", "seed": 1, "beside": True, "checkpoint": "checkpoint-1",
}  # fmt: skip
ROUTES: Routes = [
    *(("POST", path, TALK) for path in ("/api/talk", "/api/talk/stop", "/api/other")),
    *(
        ("GET", path, None)
        for path in (
            "/", "/watch.js", "/api/runs", "/api/talk/run", "/api/runs/run/completions/1", "/..%2Fx",
            "/api/runs/run/other/1", "/api/runs/run/findings/1", "/api/runs/run/problems/x%2F..",
            "/api/runs/..%2Frun/tokens/1",
            f"/{'x' * 300}.js", f"/api/runs/run/problems/{'y' * 3000}",
        )
    ),
]  # fmt: skip


@pytest.fixture
def process(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    (tmp_path / "run" / "completions").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("model_name_or_path: pebble\n")
    command = [sys.executable, "-m", "whetstone", "watch", str(tmp_path), "--port", "0"]
    with (tmp_path / "out").open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, text=True)
    try:
        deadline = time.monotonic() + 120
        while not (found := re.search(r"http://127\.0\.0\.1:(\d+)", (tmp_path / "out").read_text())):
            assert server.poll() is None and time.monotonic() < deadline, (tmp_path / "out").read_text()
            time.sleep(0.1)
        yield server, int(found[1])
    finally:
        server.kill()


def test_all_are_answered_and_pages_lose_no_row(
    process: tuple[subprocess.Popen[str], int], tmp_path: Path
) -> None:
    server, port = process
    rows = [{"step": step, "kind": "train", "reward": step / 7} for step in range(1, 21)]
    seen: list[list[Any]] = [[], []]

    def follow(own: list[Any]) -> None:
        with urlopen(f"http://127.0.0.1:{port}/api/events?run=run", timeout=120) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    own += json.loads(line[6:]).get("rows", [])
                if len(own) >= len(rows):
                    return

    headers = ["Origin: http://localhost", "Content-Type: application/json"]
    bombard(("127.0.0.1", port), 20, 3, ROUTES, headers)
    before = settled(server.pid, dict.fromkeys(("threads", "files"), 0), 2.0)
    pages = [threading.Thread(target=follow, args=(own,)) for own in seen]
    for page in pages:
        page.start()
    statuses = {}
    for number, row in enumerate(rows):
        with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        statuses |= bombard(("127.0.0.1", port), 20, number, ROUTES, headers)
    for page in pages:
        page.join(60)
    assert seen == [rows, rows]
    after = settled(server.pid, before)
    assert set(statuses) <= {None, 200, 400, 403, 404, 405, 411, 413, 414, 431, 501, 505}
    assert {200, 400, 403, 404, 405} <= set(statuses)
    assert server.poll() is None and len((tmp_path / "out").read_text().splitlines()) == 1
    assert after["threads"] <= before["threads"] and after["files"] <= before["files"]
    assert after["mb"] < before["mb"] + 100
