"""OpenEnv over its WebSocket: the real server of openenv-core, our client, real episodes."""

import base64
import contextlib
import hashlib
import importlib.util
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.environments.playing import play, playing
from whetstone.environments.openenv import OpenEnvEnvironment
from whetstone.environments.websocket import WebSocket, WebSocketError
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
def test_rows_and_settings_reach_reset_and_actions_follow_the_schema(tmp_path):
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


def answer(listener: socket.socket, frames: bytes) -> None:
    """A server of one connection: a right handshake, then `frames`."""
    connection, _ = listener.accept()
    with connection:
        head = b""
        while b"\r\n\r\n" not in head:
            head += connection.recv(1000)
        key = next(line for line in head.decode().split("\r\n") if line.startswith("Sec-WebSocket-Key"))
        text = key.split(": ")[1] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(text.encode()).digest()).decode()
        reply = f"HTTP/1.1 101 Switching Protocols\r\nSec-WebSocket-Accept: {accept}\r\n\r\n"
        connection.sendall(reply.encode() + frames)
        connection.recv(1000)


LONG = "x" * 70_000


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        (b"\x81\x02hi", "hi"),
        (b"\x89\x01p" + b"\x01\x01a" + b"\x89\x00" + b"\x80\x01b", "ab"),  # pings between fragments
        (b"\x81\x7f" + struct.pack(">Q", len(LONG)) + LONG.encode(), LONG),
        (b"\x88\x05\x03\xe8end", WebSocketError),
        (b"\x81\x7f" + struct.pack(">Q", 1 << 40), WebSocketError),
        (b"\x80\x01b", WebSocketError),  # continues nothing
        (b"\x81\x82\x00\x00\x00\x00hi", WebSocketError),  # a server must not mask
        (b"\x81\x05hi", WebSocketError),  # ends in the middle
    ],
)
def test_frames_are_read_as_the_rfc_has_them(frames, expected):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener, frames), daemon=True)
        thread.start()
        client = WebSocket(f"ws://127.0.0.1:{listener.getsockname()[1]}/ws", 0.5)
        try:
            if expected is WebSocketError:
                with pytest.raises(WebSocketError):
                    client.receive()
            else:
                assert client.receive() == expected
        finally:
            client.close()
        thread.join(5)
