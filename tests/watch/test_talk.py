"""Talk over HTTP: who may ask, what can be asked, and a process of its own that may stop, hang or die."""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import wait_until
from whetstone.config import build, dump
from whetstone.inference.sampler import Sampler
from whetstone.model.policy import load_policy
from whetstone.model.sharded import model_writer
from whetstone.run.checkpoint import save_model
from whetstone.watch.server import WatchServer
from whetstone.watch.talk import Talk, checkpoints, training_here

QUESTION = [{"role": "user", "content": "State the final answer: 5 + 8 - 7 ="}]
ENDLESS: dict[str, Any] = {"temperature": 5, "max_tokens": 4000}  # junk


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: one with a final model and a checkpoint, and one without any."""
    parent = tmp_path_factory.mktemp("talk")
    config = build({"max_completion_length": 64})
    for name in ("run", "young"):
        (parent / name).mkdir()
        (parent / name / "config.yaml").write_text(dump(config))
    policy = load_policy(config.model)
    save_model(model_writer(policy), parent / "run" / "checkpoint-2", 2)
    policy.lm.get_output_embeddings().weight.data *= 1.5
    save_model(model_writer(policy), parent / "run" / "final_model", 4)
    (parent / "run" / "checkpoint-3").mkdir()  # being written, or broken
    return parent


@contextlib.contextmanager
def serving(folder: Path, host: str = "127.0.0.1", **limits: float) -> Iterator[WatchServer]:
    server = WatchServer(folder, host)
    if limits:
        server.talk = Talk(lambda: {path.name: path for path in folder.iterdir()}, **limits)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def server(folder: Path) -> Iterator[WatchServer]:
    with serving(folder) as server:
        yield server


def post(server: WatchServer, path: str, body: Any, **headers: str | None) -> HTTPResponse:
    host = f"127.0.0.1:{server.server_address[1]}"
    connection = HTTPConnection(host, timeout=120)
    own = {"Content-Type": "application/json", "Origin": f"http://{host}"}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    sent = {name: value for name, value in (own | named).items() if value is not None}
    connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body), sent)
    return connection.getresponse()


def ask(server: WatchServer, run: str = "run", **settings: Any) -> Iterator[dict[str, Any]]:
    answer = post(server, "/api/talk", {"run": run, "messages": QUESTION, **settings})
    assert answer.status == 200
    return map(json.loads, answer)


def state(server: WatchServer, run: str = "run") -> dict[str, Any]:
    connection = HTTPConnection(f"127.0.0.1:{server.server_address[1]}", timeout=30)
    connection.request("GET", f"/api/talk/{run}")
    return json.loads(connection.getresponse().read())


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": None},
        {"Origin": "http://127.0.0.1:1"},
        {"Host": "evil.example", "Origin": "http://evil.example"},  # a name that leads here
        {"Content_Type": "text/plain"},
        {"Content_Type": "application/x-www-form-urlencoded"},
        {"Content_Type": None},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_only_a_page_of_this_server_may_ask(server: WatchServer, headers: dict[str, str | None]) -> None:
    for path in ("/api/talk", "/api/talk/stop"):
        assert post(server, path, {"run": "run", "messages": QUESTION}, **headers).status == 403
    assert state(server)["loaded"] is None


def test_another_address_needs_the_token_too(folder: Path) -> None:
    with serving(folder, "0.0.0.0") as server:
        assert post(server, "/api/talk/stop", {}).status == 403
        assert post(server, "/api/talk/stop", {}, Cookie=f"token={server.token}").status == 200
        evil = post(
            server, "/api/talk/stop", {}, Cookie=f"token={server.token}", Origin="http://evil.example"
        )
        assert evil.status == 403


def test_requests_that_make_no_sense(server: WatchServer) -> None:
    assert post(server, "/api/talk", b"{" * 100_000).status == 400
    assert post(server, "/api/talk", {}, Content_Length="1100000").status == 413  # before it is read
    assert post(server, "/api/talk", {}, Content_Length="-5").status == 400
    assert post(server, "/api/other", {}).status == 404
    for changes, reason in (
        ({"run": "../run"}, "no such run"),
        ({"run": "young"}, "save_steps"),
        ({"checkpoint": "../young"}, "no such checkpoint"),
        ({"checkpoint": "checkpoint-3"}, "no such checkpoint"),
        ({"messages": "Hello"}, "no messages"),
        ({"messages": []}, "no message to answer"),
        ({"messages": [{"role": "user", "content": 5}]}, "no message"),
        ({"messages": [{"role": "user", "content": "x" * 300_000}]}, "characters"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1e12}, "max_tokens"),
        ({"system": 1}, "system prompt"),
    ):
        [event] = ask(server, **{"run": "run", **changes})
        assert reason in event["error"], changes
    assert state(server)["loaded"] is None


def test_which_checkpoints_there_are_and_which_key_gives_one(
    server: WatchServer, folder: Path, tmp_path: Path
) -> None:
    assert [(entry["name"], entry["step"]) for entry in checkpoints(folder / "run")] == [
        ("final_model", 4),
        ("checkpoint-2", 2),
    ]
    young = state(server, "young")
    assert young["checkpoints"] == [] and "every 500 steps (save_steps)" in young["reason"]
    (tmp_path / "config.yaml").write_text('save_strategy: "no"\n')
    with serving(tmp_path) as server:
        assert "save_strategy: steps and save_steps" in state(server, tmp_path.name)["reason"]


def test_a_run_trains_here_while_its_status_is_fresh(tmp_path: Path) -> None:
    status = {"state": "running", "time": time.time(), "host": socket.gethostname()}
    runs = {"a": tmp_path}
    assert training_here(runs) is None
    for change, name in (
        ({}, "a"),
        ({"state": "ended"}, None),
        ({"time": time.time() - 60}, None),
        ({"host": "elsewhere"}, None),
        ({"time": "x"}, None),
    ):
        (tmp_path / "status.json").write_text(json.dumps({**status, **change}))
        assert training_here(runs) == name, change


@pytest.mark.slow
def test_answer_has_sampler_numbers_and_a_crash_is_contained(server: WatchServer, folder: Path) -> None:
    events = list(ask(server, seed=3, temperature=1.0))
    assert [next(iter(event)) for event in events[:2]] == ["stage", "opened"] and "end" in events[-1]
    sampler = Sampler.open(folder / "run")
    [expected] = sampler.sample(QUESTION, seed=3, temperature=1.0)
    details, end = sampler.inspect(expected), events[-1]["end"]
    assert "".join(event.get("text", "") for event in events) == end["message"] == expected.text
    assert end["ids"] == list(expected.token_ids) and end["finish"] == str(expected.finish)
    assert end["numbers"]["logprob"] == pytest.approx([token.logprob for token in details], abs=1e-3)
    assert end["numbers"]["entropy"] == pytest.approx([token.entropy for token in details], abs=1e-3)
    streamed = [x for event in events for x in event.get("logprobs", [])]
    assert streamed == pytest.approx(expected.logprobs, abs=1e-3)
    assert state(server)["loaded"] == "final_model"
    # Memory runs out in the middle of an answer.
    pieces = ask(server, **ENDLESS)
    assert "text" in next(pieces)
    assert server.talk._worker is not None
    os.kill(server.talk._worker.process.pid, signal.SIGKILL)
    assert "memory" in list(pieces)[-1]["error"]
    assert state(server)["loaded"] is None  # and the server answers


@pytest.mark.slow  # loads the model again and again
def test_answers_stop_time_out_and_idle_models_unload(folder: Path) -> None:
    with serving(folder, answer_s=20.0, idle_s=3.0) as server:
        pieces = ask(server, **ENDLESS)
        wait_until(lambda: "text" in next(pieces))
        [busy] = ask(server)
        assert "stop it first" in busy["error"]
        assert post(server, "/api/talk/stop", {}).status == 200
        end = list(pieces)[-1]["end"]
        assert end["finish"] == "stopped" and 0 < len(end["ids"]) < 4000
        # The same model, at once; a page that goes away ends it.
        pieces = ask(server, checkpoint="final_model", max_tokens=5)
        assert "text" in next(pieces)
        assert list(pieces)[-1]["end"]["ids"]
        wait_until(lambda: state(server)["loaded"] is None)
    with serving(folder, answer_s=1.0, idle_s=60.0) as server:
        *_, last = ask(server, **ENDLESS)
        assert last["end"]["finish"] == "stopped after 1 s"
        # A stop while the next checkpoint is being loaded.
        pieces = ask(server, checkpoint="checkpoint-2")
        assert "loading checkpoint-2" in next(pieces)["stage"]
        post(server, "/api/talk/stop", {})
        assert list(pieces)[-1]["error"] == "Stopped."


@pytest.mark.slow
def test_beside_a_run_only_on_the_cpu_and_only_when_asked(folder: Path) -> None:
    status = folder / "young" / "status.json"

    def write(run_state: str) -> None:
        entry = {"state": run_state, "time": time.time(), "host": socket.gethostname()}
        status.write_text(json.dumps(entry))

    with serving(folder) as server, _cleared(status):
        write("running")
        assert state(server)["training"] == "young"
        [event] = ask(server)
        assert "young trains on this machine" in event["error"]
        events = list(ask(server, beside=True, max_tokens=4))
        assert events[1]["opened"]["device"] == "cpu" and "end" in events[-1]
        write("ended")
        assert "end" in list(ask(server, max_tokens=4))[-1]


@contextlib.contextmanager
def _cleared(path: Path) -> Iterator[None]:
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("end", [lambda talk: talk.close(), lambda talk: talk.unload("a test")])
def test_the_process_ends_with_the_viewer(folder: Path, end: Callable[[Talk], None]) -> None:
    talk = Talk(lambda: {"run": folder / "run"})
    with contextlib.closing(talk.answer({"run": "run", "messages": QUESTION, **ENDLESS})) as events:
        wait_until(lambda: "text" in next(events))
        assert talk._worker is not None
        process = talk._worker.process
        end(talk)
        assert "unloaded" in list(events)[-1]["error"]
    assert process.poll() == -signal.SIGKILL
