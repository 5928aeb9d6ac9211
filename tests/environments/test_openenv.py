"""OpenEnv over its WebSocket: the real server of openenv-core, our client, real episodes."""

import contextlib
import importlib.util
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request
from websockets.server import ServerProtocol
from websockets.sync.server import serve

from tests.environments.playing import play, playing
from whetstone.environments.openenv import MAX_MESSAGE, OpenEnvEnvironment, ServerFailed
from whetstone.environments.table import factory_of
from whetstone.errors import UserError
from whetstone.types import Finish

SERVER = Path(__file__).with_name("openenv_server.py")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def serving(kind: str, num_sessions: int) -> Iterator[str]:
    if importlib.util.find_spec("openenv") is None:
        pytest.skip("needs openenv-core (pip install openenv-core)")
    port = free_port()
    command = [sys.executable, str(SERVER), str(port), kind, str(num_sessions)]
    process = subprocess.Popen(command)
    try:
        for _ in range(600):
            with contextlib.suppress(urllib.error.URLError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/schema", timeout=5).close()
                break
            assert process.poll() is None, "the server ended"
            time.sleep(0.2)
        yield f"ws://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def bisect(write: str = "{}"):
    bounds = [1, 9]

    def script(turn: int, new: str) -> str:
        middle = sum(bounds) // 2
        if "Higher." in new:
            bounds[0] = middle + 1
        elif "Lower." in new:
            bounds[1] = middle - 1
        return write.format(sum(bounds) // 2)

    return script


@pytest.mark.slow
def test_episodes_are_sessions_of_the_server():
    with serving("text", num_sessions=1) as url, playing({"datasets": {url: {}}}) as session:
        assert session.mixture.problem(0).question == "Guess my number from 1 to 9."
        for problem in range(3):  # one session at a time: each is given back
            won = play(session, bisect("My guess is {}"), problem)
            assert won.episode is not None and won.episode.error is None
            assert won.score.reward == won.score.parts["correct"] == 1.0
            assert won.episode.messages[-1]["content"] == "Right."
        broken = play(session, lambda turn, new: "crash")
        assert broken.episode is not None and "the game broke" in (broken.episode.error or "")
        assert broken.completion.finish is Finish.TOOL_ERROR


@pytest.mark.slow
def test_reset_gets_rows_and_settings_actions_follow_schema(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "A game. ", "high": 2}\n')
    with serving("number", num_sessions=4) as url:
        values = {"datasets": {"environment": {"config": {"factory": url, "path": str(rows)}}}}
        with playing(values) as session:
            assert session.mixture.problem(0).question.endswith("Guess my number from 1 to 2.")
            rollout = play(session, lambda turn, new: ["I am not sure", "Not 7 but 1.", "2"][turn])
        assert rollout.episode is not None
        seen = [m["content"] for m in rollout.episode.messages if m["role"] == "user"]
        assert seen[0] == "Error: there is no number in your answer."
        assert rollout.score.reward == 1.0 and seen[-1] == "Right."
    with serving("fields", num_sessions=4) as url:
        environment = OpenEnvEnvironment(url, observation_field=["text", "hints"])
        assert environment.reset(3) == "Guess my number from 1 to 9.\n[]"
        assert "guess, reason" in environment.step("five")[0]
        assert "not valid" in environment.step('{"guess": 5}')[0]  # reason is missing
        said = environment.step('Like this: {"guess": 5, "reason": "middle"}')[0]
        assert said.split(".")[0] in ("Higher", "Lower", "Right")
        environment.close()


@pytest.mark.slow
def test_a_full_server_is_named():
    with serving("text", num_sessions=1) as url:
        first = OpenEnvEnvironment(url)
        first.reset(1)
        with pytest.raises(Exception, match="max_concurrent_envs"):
            OpenEnvEnvironment(url, connect_timeout_s=1.0).reset(1)
        first.close()
        assert OpenEnvEnvironment(url, connect_timeout_s=5.0).reset(1) == "Guess my number from 1 to 9."


def test_no_server_is_one_sentence():
    with pytest.raises(UserError, match="start it"):
        OpenEnvEnvironment(f"ws://127.0.0.1:{free_port()}")


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (json.dumps({"type": "observation", "data": {"observation": {"text": "x" * 70_000}}}), None),
        (["{", "}"], "answered with no message of OpenEnv"),  # fragments of one message
        ("hi", "answered with no JSON"),
        (b"\xff", "answered with no JSON"),
        ("[" * 100_000, "answered with no JSON"),
        ("x" * (MAX_MESSAGE + 1), "closed the connection.*1009"),
        (lambda connection: connection.close(1000, "full"), "closed the connection.*full"),
        (lambda connection: connection.socket.sendall(b"\x80\x01b"), "closed the connection.*1002"),
        (lambda connection: connection.socket.shutdown(socket.SHUT_RDWR), "closed the connection"),
        (lambda connection: time.sleep(1.0), "did not answer in 0.3 s"),
    ],
)  # fmt: skip
def test_what_a_server_may_do_is_one_sentence(reply, expected):
    def handle(connection) -> None:
        with contextlib.suppress(ConnectionClosed):
            connection.recv()
            reply(connection) if callable(reply) else connection.send(reply)
            connection.recv()

    with serve(handle, "127.0.0.1", 0, compression=None) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        environment = OpenEnvEnvironment(url, action_field="text", message_timeout_s=0.3)
        if expected is None:
            assert environment.reset(1) == "x" * 70_000
        else:
            with pytest.raises(ServerFailed, match=f"^{url} {expected}"):
                environment.reset(1)
        environment.close()
        server.shutdown()


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "404"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "HTTP"),
        (None, "timed out"),
    ],
)
def test_a_server_of_something_else_is_one_sentence(reply, expected):
    def handle(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            while connection.recv(1000):
                if reply is not None:
                    return connection.sendall(reply)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=handle, args=(listener,), daemon=True).start()
        url = f"ws://127.0.0.1:{listener.getsockname()[1]}"
        environment = OpenEnvEnvironment(url, action_field="text", message_timeout_s=0.3)
        with pytest.raises(ServerFailed, match=f"^{url} can't be reached .*{expected}"):
            environment.reset(1)
    with pytest.raises(ServerFailed, match=r"reached .* refused"):
        environment.reset(1)


def test_a_server_that_does_not_read_ends_in_time():
    def handle(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        protocol = ServerProtocol()
        protocol.receive_data(connection.recv(1 << 16))
        [request] = protocol.events_received()
        assert isinstance(request, Request)
        protocol.send_response(protocol.accept(request))
        connection.sendall(b"".join(protocol.data_to_send()))
        released.wait(10)
        connection.close()

    released = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=handle, args=(listener,), daemon=True).start()
        url = f"ws://127.0.0.1:{listener.getsockname()[1]}"
        environment = OpenEnvEnvironment(url, action_field="text", message_timeout_s=1.0)
        started = time.monotonic()
        with pytest.raises(ServerFailed, match="closed the connection"):
            environment.reset(1, text="x" * (16 << 20))
        assert time.monotonic() - started < 5.0
        released.set()


def test_the_client_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "websockets.sync.client", None)
    with pytest.raises(UserError, match=r"pip install 'whetstone\[openenv\]'"):
        factory_of("ws://127.0.0.1:1")
