#!/usr/bin/env python3
"""Serving speed: concurrent sessions against `whet serve`, and against vLLM's server at the same work.

Every session sends its requests one after the other, each a stream of /v1/completions: prompts of random
tokens, a fixed number of new tokens at temperature 1 (`ignore_eos`, so all do the same work). A round with
few tokens comes first and is not measured. The figures: tokens/s of all sessions together, seconds to the
first token (median, 95 %), failures. `--vanish N`: N more clients close their connections at their first
token, again and again, until the others are finished; then the same work without them, in a row of its own.

    python benchmarks/serving.py --model pebble --sessions 16 --device cpu
    python benchmarks/serving.py --model FOLDER --sessions 200 --write      # vLLM after ours, where installed
    python benchmarks/serving.py --url http://127.0.0.1:8000 --name NAME    # a server that runs already

`--write` keeps the rows with date, machine and versions in benchmarks/results/serving.json. The client is a
process of its own beside the server, on the same machine.
"""

import argparse
import asyncio
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

RESULTS = Path(__file__).parent / "results" / "serving.json"
START_S = 900  # until a server answers: the first start of vLLM compiles
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Outcome:
    """One request."""

    first_s: float  # to the first token
    total_s: float
    num_tokens: int
    error: str | None = None


def make_bodies(args: argparse.Namespace, name: str, vocabulary: int) -> list[list[dict[str, Any]]]:
    """The requests of every session; the same for everybody."""
    generator = random.Random(args.seed)
    shortest, longest = args.prompt_tokens

    def body() -> dict[str, Any]:
        length = generator.randint(shortest, longest)
        prompt = [generator.randrange(min(100, vocabulary // 2), vocabulary) for _ in range(length)]
        settings = {"max_tokens": args.new_tokens, "temperature": 1.0, "ignore_eos": True}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": name, "prompt": prompt, **settings, **options}

    return [[body() for _ in range(args.requests)] for _ in range(args.sessions)]


def request_bytes(host: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def send(url: str, body: dict[str, Any]) -> Outcome:
    """Send a request and read its stream. The events are not parsed, but for the last one with tokens."""
    parts = urlsplit(url)
    started = time.perf_counter()
    first = 0.0
    data = bytearray()
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        with contextlib.closing(writer):
            writer.write(request_bytes(parts.netloc, body))
            while piece := await reader.read(1 << 16):
                if not first and b"data:" in piece:
                    first = time.perf_counter() - started
                data += piece
                if b"[DONE]" in data[-64:]:
                    break
    except OSError as error:
        return Outcome(first, time.perf_counter() - started, 0, str(error) or type(error).__name__)
    total = time.perf_counter() - started
    if b"[DONE]" not in data[-64:] or not data.startswith(b"HTTP/1.1 200"):
        return Outcome(first, total, 0, data[:300].decode(errors="replace").replace("\r\n", " "))
    at = data.rfind(b'"completion_tokens"')
    count = int(data[at + 20 :].split(b",")[0].strip(b" :}")) if at >= 0 else 0
    error = None if count == body["max_tokens"] else f"{count} tokens of {body['max_tokens']}"
    return Outcome(first, total, count, error)


async def vanish(url: str, body: dict[str, Any], departures: list[float]) -> None:
    """Leave at the first token, and come again, until cancelled."""
    parts = urlsplit(url)
    while True:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        with contextlib.closing(writer):
            writer.write(request_bytes(parts.netloc, body))
            while (piece := await reader.read(1 << 16)) and b"data:" not in piece:
                pass
        departures.append(time.perf_counter())


async def run_sessions(
    url: str, sessions: list[list[dict[str, Any]]], num_vanishing: int = 0
) -> tuple[list[Outcome], int]:
    """The outcome of every request, and how many requests were left at their first token."""

    async def session(bodies: list[dict[str, Any]]) -> list[Outcome]:
        return [await send(url, body) for body in bodies]

    body = sessions[0][0]
    departures: list[float] = []
    leaving = [asyncio.create_task(vanish(url, body, departures)) for _ in range(num_vanishing)]
    results = await asyncio.gather(*(session(bodies) for bodies in sessions))
    for task in leaving:
        task.cancel()
    ends = await asyncio.gather(*leaving, return_exceptions=True)
    refused = [end for end in ends if isinstance(end, OSError)]
    outcomes = [outcome for outcomes in results for outcome in outcomes]
    outcomes += [Outcome(0.0, 0.0, 0, f"a client that vanishes: {error}") for error in refused]
    return outcomes, len(departures)


def summarize(who: str, outcomes: list[Outcome], seconds: float) -> dict[str, Any]:
    fine = [outcome for outcome in outcomes if outcome.error is None]
    firsts = sorted(outcome.first_s for outcome in fine)
    tokens = sum(outcome.num_tokens for outcome in fine)
    row: dict[str, Any] = {"who": who, "requests": len(outcomes), "failures": len(outcomes) - len(fine)}
    if fine:
        row |= {
            "seconds": round(seconds, 2),
            "tokens": tokens,
            "tokens_per_s": round(tokens / seconds, 1),
            "first_token_median_s": round(statistics.median(firsts), 4),
            "first_token_p95_s": round(firsts[max(0, -(-95 * len(firsts) // 100) - 1)], 4),
            "request_median_s": round(statistics.median(outcome.total_s for outcome in fine), 3),
        }
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    return {**row, "first_error": errors[0]} if errors else row


def measure(who: str, url: str, name: str, vocabulary: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    sessions = make_bodies(args, name, vocabulary)
    warm = [[{**bodies[0], "max_tokens": min(WARM_UP_TOKENS, args.new_tokens)}] for bodies in sessions]
    asyncio.run(run_sessions(url, warm))
    rows = []
    for num_vanishing in [args.vanish, 0] if args.vanish else [0]:
        started = time.perf_counter()
        outcomes, num_vanished = asyncio.run(run_sessions(url, sessions, num_vanishing))
        row = summarize(who, outcomes, time.perf_counter() - started)
        rows.append(row | ({"vanished": num_vanished} if num_vanishing else {}))
        print(json.dumps(rows[-1]), flush=True)
    return rows


@contextlib.contextmanager
def server(command: list[str], url: str, log: Path) -> Iterator[None]:
    """A server process until the `with` ends; its output is in `log`."""
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + START_S
            while not is_healthy(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    lines = log.read_text(errors="replace").splitlines()[-15:]
                    raise SystemExit(f"{command[2:5]} did not start:\n" + "\n".join(lines))
                time.sleep(0.5)
            yield
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def our_command(args: argparse.Namespace, port: int, length: int) -> list[str]:
    command = [sys.executable, "-m", "whetstone", "serve", args.model, "--name", "model", "--port", str(port)]
    limits = ["--max-length", str(length), "--max-sequences", str(args.sessions + args.vanish)]
    return [*command, *limits, "--device", args.device]


def vllm_command(args: argparse.Namespace, port: int, length: int) -> list[str]:
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", args.model]
    limits = ["--max-model-len", str(length), "--max-num-seqs", str(args.sessions + args.vanish)]
    names = ["--served-model-name", "model", "--generation-config", "vllm", "--dtype", "bfloat16"]
    return [*command, "--port", str(port), *limits, *names]


def vocabulary_of(model: str) -> int:
    from transformers import AutoConfig

    from whetstone.model.hub import resolve

    return AutoConfig.from_pretrained(resolve(model)).get_text_config().vocab_size


def machine() -> str:
    device = "cpu"
    with contextlib.suppress(ImportError):
        import torch

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return f"{platform.machine()}, {os.cpu_count()} cores, {device}"


def write(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    packages = [name for name in ("torch", "transformers", "vllm") if importlib.util.find_spec(name)]
    shortest, longest = args.prompt_tokens
    command = " ".join(["python benchmarks/serving.py", *(w for w in sys.argv[1:] if w != "--write")])
    entry = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "command": command,
        "work": f"{args.sessions} sessions of {args.requests} requests, prompts of {shortest} to {longest} "
        f"tokens, {args.new_tokens} new tokens each, streamed",
        "rows": rows,
    }
    earlier = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
    others = [old for old in earlier if (old["command"], old["machine"]) != (command, machine())]
    RESULTS.write_text(json.dumps([*others, entry], indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="pebble", help="a folder, pebble, or another name")
    parser.add_argument("--url", help="measure this server alone")
    parser.add_argument("--name", default="model", help="the model's name at --url")
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--requests", type=int, default=2, help="of every session")
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(128, 512), metavar=("FROM", "TO"))
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--vanish", type=int, default=0, help="clients that leave at their first token")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--only", choices=("ours", "vllm"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    vocabulary = vocabulary_of(args.model)
    if args.url:
        rows = measure(args.url, args.url.rstrip("/"), args.name, vocabulary, args)
    else:
        rows = []
        length = args.prompt_tokens[1] + args.new_tokens + 8
        commands = {"ours": our_command, "vllm": vllm_command}
        for who, make in commands.items():
            if args.only not in (None, who) or (who == "vllm" and not importlib.util.find_spec("vllm")):
                continue
            port = free_port()
            url, log = f"http://127.0.0.1:{port}", Path(f"/tmp/serving-{who}.log")
            with server(make(args, port, length), url, log):
                rows += measure(who, url, "model", vocabulary, args)
    if args.write:
        write(rows, args)


if __name__ == "__main__":
    main()
