"""The process of `whet serve` under generated requests, beside two clients that want their tokens."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.support.http_fuzz import Innocent, Routes, bombard, settled

NORMAL = (
    r"whetstone [\d.]+: serve pebble|  (loading|first) .*|.* at http://\S+ .*|.* at once, .*"
    r"|[\d:]+ \d+ requests? in flight, .*"
)
QUESTION = "State the final answer to the following arithmetic problem: 4 + 73 - 12 ="
SAMPLING = {"max_tokens": 8, "temperature": 1.0, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 1}
CHAT = {
    "model": "pebble", "messages": [{"role": "user", "content": QUESTION}], **SAMPLING, "n": 2, "stop": ["<"],
    "stream": True, "stream_options": {}, "ignore_eos": True, "return_token_ids": True, "logprobs": True,
    "top_logprobs": 2, "tools": [], "tool_choice": "auto", "max_completion_tokens": 5, "user": "u",
    "response_format": {"type": "text"}, "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {},
    "metadata": {}, "parallel_tool_calls": False,
}  # fmt: skip
COMPLETION = {
    "model": "pebble", "prompt": "5 + 8", **SAMPLING, "n": 1, "stream": False, "echo": False, "logprobs": 1,
    "best_of": 1, "suffix": "",
}  # fmt: skip
PARAMS = {**SAMPLING, "n": 2, "logprobs": 1, "stop_token_ids": [5], "ignore_eos": True, "min_tokens": 0}
TOKENS = {"token_ids": [3, 4, 5], "request_id": "r", "model": "pebble", "sampling_params": PARAMS}
ROUTES: Routes = [
    *(3 * [("POST", "/v1/chat/completions", CHAT)]),
    ("POST", "/v1/completions", COMPLETION),
    ("POST", "/inference/v1/generate", TOKENS),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/pebble", None),
    ("GET", "/health", None),
]
NUM_KNOWN = 4  # answers of each innocent client


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[bytes], Path, int]]:
    folder = tmp_path_factory.mktemp("serve")
    command = [sys.executable, "-m", "whetstone", "serve", "pebble", "--port", "0", "--max-length", "512"]
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        server = subprocess.Popen(command, stdout=out, stderr=err)
    try:
        deadline = time.monotonic() + 240
        while not (found := re.search(r"http://127\.0\.0\.1:(\d+)/v1", (folder / "out").read_text())):
            assert server.poll() is None and time.monotonic() < deadline, (folder / "err").read_text()
            time.sleep(0.1)
        yield server, folder, int(found[1])
        server.send_signal(signal.SIGTERM)
        server.send_signal(signal.SIGTERM)  # as `timeout` does
        assert server.wait(60) == 0
        assert unusual_lines(folder, "|Ending: .*") == []
    finally:
        server.kill()


def unusual_lines(folder: Path, more: str = "") -> list[str]:
    lines = [
        line for line in (folder / "out").read_text().splitlines() if not re.fullmatch(NORMAL + more, line)
    ]
    return lines + (folder / "err").read_text().splitlines()


def streamed_tokens(port: int, seed: int) -> list[int]:
    messages = [{"role": "user", "content": QUESTION.replace("73", str(seed))}]
    body = {"model": "pebble", "messages": messages, "seed": seed, "temperature": 2.0, "max_tokens": 40}
    body |= {"stream": True, "ignore_eos": True, "return_token_ids": True}
    request = Request(f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode())
    with urlopen(request, timeout=300) as answer:
        events: list[Any] = [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    return [token for choice in choices for token in choice.get("token_ids", [])]


@pytest.mark.parametrize("count", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_all_are_answered_and_streams_lose_nothing(
    process: tuple[subprocess.Popen[bytes], Path, int], count: int
) -> None:
    server, folder, port = process
    seeds = [[100 * client + number for number in range(NUM_KNOWN)] for client in range(2)]
    alone = [[streamed_tokens(port, seed) for seed in own] for own in seeds]
    assert {len(tokens) for own in alone for tokens in own} == {40}
    assert len({tuple(tokens) for own in alone for tokens in own}) > NUM_KNOWN
    bombard(("127.0.0.1", port), 40, 7, ROUTES)  # what is allocated once
    before = settled(server.pid, dict.fromkeys(("threads", "files"), 0), 2.0)
    stop, started = threading.Event(), time.monotonic()
    innocents = [
        Innocent(lambda number, own=own: streamed_tokens(port, own[number]), expected, stop)
        for own, expected in zip(seeds, alone, strict=True)
    ]
    for innocent in innocents:
        innocent.start()
    statuses = bombard(("127.0.0.1", port), count, count, ROUTES)
    seconds = time.monotonic() - started
    stop.set()
    for innocent in innocents:
        innocent.join(300)
        assert innocent.wrong == [] and innocent.count > 0
    after = settled(server.pid, before)
    streams = [innocent.count for innocent in innocents]
    print(f"{count} in {seconds:.0f} s: {dict(statuses)}, streams {streams}, {before} -> {after}")
    assert set(statuses) <= {None, 200, 400, 403, 404, 405, 411, 413, 414, 431, 501, 505}
    assert statuses[200] > 0.1 * count and statuses[400] > 0.1 * count and statuses[403] > 0
    assert server.poll() is None and unusual_lines(folder) == []
    assert after["threads"] <= before["threads"] and after["files"] <= before["files"]
    assert after["mb"] < before["mb"] + 200
