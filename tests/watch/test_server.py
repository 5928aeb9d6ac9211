"""The server of `whet watch` over HTTP: what it reads, what it refuses, and events while files grow."""

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.support.page import HOSTILE
from tests.support.runs import run
from whetstone.errors import UserError
from whetstone.watch.runs import Follower, find_grids, find_runs, grid, steps
from whetstone.watch.server import WatchServer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run beside one that has only begun."""
    parent = tmp_path_factory.mktemp("watch")
    run(parent, max_steps=2, log_completions_steps=1, log_tokens_groups=1, save_strategy="no")
    begun = parent / "grid" / "a b"
    (begun / "completions").mkdir(parents=True)
    (begun / "config.yaml").write_text("model_name_or_path: pebble\n")
    line = {"step": 1, "problem": HOSTILE, "completion": HOSTILE, "messages": [], "reward": 1.0, "sample": 0}
    (begun / "completions" / "step_1.jsonl").write_text(json.dumps(line) + "\nbroken\n[1]\n")
    (begun / "completions" / "tokens_1.npz").write_bytes(b"no archive")
    return parent


@pytest.fixture
def server(folder: Path) -> Iterator[WatchServer]:
    server = WatchServer(folder)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def get(server: WatchServer, path: str, **headers: str) -> tuple[int, Any, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    kind = answer.headers["Content-Type"]
    return answer.status, json.loads(content) if "json" in kind else content, dict(answer.headers)


def test_runs_are_found_below_a_folder_the_newest_first(folder: Path, server: WatchServer) -> None:
    assert set(find_runs(folder)) == {"run", "grid/a b"}
    assert list(find_runs(folder / "run")) == ["run"]
    with pytest.raises(UserError, match="is not a folder"):
        find_runs(folder / "nowhere")
    status, runs, _ = get(server, "/api/runs")
    assert status == 200 and {entry["name"] for entry in runs["runs"]} == {"run", "grid/a b"}
    finished = next(entry for entry in runs["runs"] if entry["name"] == "run")
    assert finished["config"]["model_name_or_path"] == "pebble" and finished["status"]["state"] == "ended"
    assert finished["results"] is not None


def test_runs_inside_a_folder_that_is_a_run_are_found(tmp_path: Path) -> None:
    """As where a run without run_name was started in the folder of all runs."""
    for run_folder in (tmp_path, tmp_path / "a", tmp_path / "a" / "b"):
        run_folder.mkdir(exist_ok=True)
        (run_folder / "run.json").write_text("{}")
    assert list(find_runs(tmp_path)) == [tmp_path.name, "a"]
    assert list(find_runs(tmp_path / "a")) == ["a", "b"]


def test_the_files_of_a_run_arrive_as_they_were_written(folder: Path, server: WatchServer) -> None:
    lines = (folder / "run" / "completions" / "step_2.jsonl").read_text().splitlines()
    assert get(server, "/api/runs/run/completions/2")[1] == [json.loads(line) for line in lines]
    document = json.loads((folder / "run" / "eval_results" / "eval_step_2.json").read_text())
    assert get(server, "/api/runs/run/evaluations/2")[1] == document
    tokens = get(server, "/api/runs/run/tokens/2")[1]
    assert len(tokens["parts"]) == 4 and tokens["rules"][0] == "clipped"
    written = {(row["problem"], row["sample"]): row for row in map(json.loads, lines)}
    for part in tokens["parts"]:
        row = written[part["row"]["problem"], part["row"]["sample"]]
        assert len(part["ids"]) == len(part["rules"]) == row["length"]
        assert "".join(tokens["texts"][str(token)] for token in part["ids"]).startswith(row["completion"])
        assert len(part["numbers"]["sampler_logprob"]) == row["length"]
    assert get(server, "/api/runs/run/tasks/2")[1] == document["summary"]["per_task"]
    findings = get(server, "/api/runs/run/findings/2")[1]
    assert findings and set(findings[0]) == {"severity", "title", "evidence", "remedy"}


def test_hostile_and_broken_files_are_data(server: WatchServer) -> None:
    [row] = get(server, f"/api/runs/{quote('grid/a b', safe='')}/completions/1")[1]
    assert row["completion"] == HOSTILE  # as JSON; the page sets it as text
    assert get(server, f"/api/runs/{quote('grid/a b', safe='')}/tokens/1")[0] == 404
    assert get(server, f"/api/runs/{quote('grid/a b', safe='')}/findings/1")[1] == []


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/..%2F..%2Fetc/completions/1",
        "/api/runs/run/completions",
        "/api/runs/run/completions/..%2F..%2Fconfig",
        "/api/runs/run/completions/" + "9" * 40,
        "/api/runs/run/other",
        "/api/runs/run/tokens/99999",
        "/api/runs/none/findings/1",
        "/api",
        "/server.py",
        "/static/watch.js",
        "/..%2Fserver.py",
    ],
)
def test_nothing_else_can_be_read(server: WatchServer, path: str) -> None:
    assert get(server, path)[0] == 404


def test_page_loads_from_its_host_alone(server: WatchServer) -> None:
    for path, kind in (("/", "text/html"), ("/watch.js", "text/javascript"), ("/watch.css", "text/css")):
        status, content, headers = get(server, path)
        assert status == 200 and content and headers["Content-Type"].startswith(kind)
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert get(server, "/", Host="evil.example")[0] == 403
    assert get(server, "/api/runs", Host="evil.example:80")[0] == 403


def test_another_address_needs_the_token(folder: Path) -> None:
    server = WatchServer(folder, "0.0.0.0")
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    assert server.token is not None and server.token in server.address
    assert get(server, "/")[0] == get(server, "/?token=wrong")[0] == 403
    status, _, headers = get(server, f"/?token={server.token}")
    assert status == 200 and "HttpOnly" in headers["Set-Cookie"]
    assert get(server, "/api/runs", Cookie=f"token={server.token}")[0] == 200
    assert get(server, "/api/runs", Cookie="token=x; =;")[0] == 403
    server.shutdown()
    server.server_close()


def test_events_tell_what_is_new_in_each_run(server: WatchServer, folder: Path) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    connection.request("GET", "/api/events?run=run&run=grid%2Fa+b&run=..%2F..&run=none")
    answer = connection.getresponse()
    assert answer.headers["Content-Type"] == "text/event-stream"
    events = {}
    for _ in range(2):
        event = json.loads(answer.readline().decode().removeprefix("data: "))
        events[event["run"]] = event
        assert answer.readline() == b"\n"
    assert answer.readline().startswith(b":")  # nothing of the names that are no runs
    connection.close()
    event = events["run"]
    assert [row["step"] for row in event["rows"] if row["kind"] == "train"] == [1, 2]
    assert event["completions"] == event["tokens"] == [1, 2] and event["status"]["state"] == "ended"
    assert events["grid/a b"]["completions"] == [1] and "rows" not in events["grid/a b"]


def test_a_problem_at_every_step(folder: Path, server: WatchServer) -> None:
    lines = (folder / "run" / "completions" / "step_1.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["problem"] == json.loads(lines[0])["problem"]]
    entries = get(server, f"/api/runs/run/problems/{quote(rows[0]['problem'], safe='')}")[1]["entries"]
    first = entries[0]
    assert (first["kind"], first["step"], first["count"]) == ("training", 1, 4)
    assert first["reward"] == pytest.approx(sum(row["reward"] for row in rows) / 4)
    assert first["right"] == sum(row["parts"]["correct"] for row in rows)
    document = json.loads((folder / "run" / "eval_results" / "eval_step_0.json").read_text())
    name = document["completions"][0]["problem"]
    entries = get(server, f"/api/runs/run/problems/{quote(name, safe='')}")[1]["entries"]
    assert [(entry["kind"], entry["step"]) for entry in entries] == [("evaluation", 0), ("evaluation", 2)]
    hostile = get(server, f"/api/runs/{quote('grid/a b', safe='')}/problems/{quote(HOSTILE, safe='')}")[1]
    assert [entry["reward"] for entry in hostile["entries"]] == [1.0]
    assert get(server, "/api/runs/run/problems/nothing")[1] == {"entries": []}


def test_a_comparison_while_it_fills(tmp_path: Path) -> None:
    """Three of four runs have ended: the first variant has a mean over two seeds."""
    parent = tmp_path / "compare"
    cells = [
        {"name": f"{variant}_seed={seed}", "variant": variant, "seed": seed, "settings": []}
        for variant in ("a", "b")
        for seed in (1, 2)
    ]
    (parent / "runs").mkdir(parents=True)
    (parent / "grid.json").write_text(json.dumps({"source": "quickstart", "cells": cells}))
    for cell, after in zip(cells, (0.5, 0.7, 0.8), strict=False):
        run_folder = parent / "runs" / cell["name"]
        run_folder.mkdir()
        (run_folder / "config.yaml").write_text("max_steps: 3\n")
        ends = {"accuracy_before": {"mean": 0.25}, "accuracy_after": {"mean": after}, "seconds": 9.0}
        ends |= {"greedy_before": None, "greedy_after": None}
        (run_folder / "train_results.json").write_text(json.dumps(ends))
    assert set(find_grids(tmp_path)) == {"compare"}
    names = {path: name for name, path in find_runs(tmp_path).items()}
    shown = grid(parent, names)
    assert shown is not None
    assert [cell["after"] for cell in shown["cells"]] == [0.5, 0.7, 0.8, None]
    assert [cell["run"] for cell in shown["cells"]] == [
        *(f"compare/runs/{c['name']}" for c in cells[:3]),
        None,
    ]
    first, second = shown["variants"]
    assert first["accuracy_after"]["mean"] == pytest.approx(0.6) and first["num_seeds"] == 2
    assert first["gain"]["mean"] == pytest.approx(0.35) and second["gain"]["low"] is None
    (parent / "grid.json").write_text("{")
    assert grid(parent, names) is None


def test_a_follower_reads_only_what_was_added(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    follower = Follower(tmp_path)
    assert "rows" not in follower.changes()
    row = {"step": 1, "kind": "train", "reward": 0.5}
    text = json.dumps(row) + "\n"
    file.write_text(text + text[:9])
    assert follower.changes()["rows"] == [row]
    with file.open("a") as handle:
        handle.write(text[9:] + "nonsense\n")
    assert follower.changes() == {"rows": [row]}
    assert follower.changes() == {}
    file.unlink()
    assert follower.changes() == {}
    file.write_text(text)  # as a resumed run writes it: another file, with fewer rows
    changes = follower.changes()
    assert changes["reset"] and changes["rows"] == [row]
    (tmp_path / "completions").mkdir()
    for name in ("step_3.jsonl", "step_x.jsonl", "tokens_4.npz", ".step_5.jsonl.part"):
        (tmp_path / "completions" / name).touch()
    assert follower.changes() == {"completions": [3], "tokens": [4]}
    assert steps(tmp_path / "nowhere", "step_", ".jsonl") == []
