"""`whet serve` as a command: a model or a configuration, wrong input, and a server as a process."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from whetstone.__main__ import run

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "give a run, such as outputs/quickstart"),
        (["quickstart"], "rollout_engine is native, which has no server"),
        (["config/grpo.yaml"], "rollout_engine is native, which has no server"),
        (["rollout_engine=hf"], "rollout_engine is hf, which has no server"),
        (["grpo", "--port", "8001"], "--port is for serving a model"),
        (["pebble", "--adapter", "nothing"], "give NAME=PATH"),
        (["pebble", "--adapter", "a=x", "--adapter", "a=y"], "is there twice"),
        (["./outputs/quickstart/nowhere"], "nowhere"),
        (["pebble", "--host", "256.1.1.1"], "choose another --port"),
    ],
)
def test_wrong_input(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", *words]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_a_taken_port_is_found_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("whetstone.serving.models.ServedModel.open", lambda *_, **__: pytest.fail("loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert run(["serve", "pebble", "--port", port]) == 2
    assert f"127.0.0.1:{port} can't be used" in capsys.readouterr().err


def test_a_key_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--api-key", "hidden", "./outputs/quickstart/nowhere"]) == 2
    assert "hidden" not in "".join(capsys.readouterr())


@contextlib.contextmanager
def server_process(*words: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """The process, its address and its output, which grows."""
    command = [sys.executable, "-m", "whetstone", "serve", *words, "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    lines: list[str] = []
    assert process.stdout is not None
    try:
        for line in process.stdout:
            lines.append(line)
            if match := re.search(r"http://\S+/v1", line):
                reader = threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True)
                reader.start()
                yield process, match[0], lines
                break
        else:
            raise AssertionError("".join(lines))
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_ctrl_c_ends_a_server_and_its_answers() -> None:
    with server_process("pebble", "--api-key", "secret", "--max-length", "4096") as (process, url, lines):
        client = openai.OpenAI(base_url=url, api_key="secret", max_retries=0, timeout=300)
        settings: dict[str, Any] = {
            "model": "pebble",
            "messages": [{"role": "user", "content": "very private"}],
        }
        short = client.chat.completions.create(**settings, max_tokens=4, temperature=0)
        assert short.choices[0].message.content
        stream = client.chat.completions.create(
            **settings, max_tokens=4000, temperature=1, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(openai.APIError):  # or it was done within the time
            list(stream)
        assert process.wait(120) == 0
    assert "private" not in "".join(lines) and "secret" not in "".join(lines)


@pytest.mark.slow  # fetches SmolLM2-135M
def test_smollm2_answers_as_transformers() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from whetstone.model.hub import resolve

    folder = resolve("smollm2-135m")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    messages: list[Any] = [
        {"role": "system", "content": "Answer in one sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    out = model.float().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    expected = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    with server_process("smollm2-135m", "--max-length", "512") as (_, url, _):
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=600)
        name = client.models.list().data[0].id
        answer = client.chat.completions.create(model=name, messages=messages, temperature=0, max_tokens=24)
        assert answer.choices[0].message.content == expected
        with urllib.request.urlopen(url.replace("/v1", "/health"), timeout=60) as response:
            assert json.load(response) == {"status": "ok"}
