"""The endpoint with OpenAI's own client: the tokens of transformers and of the engine, in OpenAI's shapes."""

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.serving import Running, serving
from tests.support.waiting import wait_until
from whetstone.endpoint import http as http_server
from whetstone.engines.base import SamplingParams
from whetstone.inference.sampler import Sampler
from whetstone.serving.backend import BackendUnavailable, GenerationRequest
from whetstone.serving.models import ServedModel

QUESTION = "State the final answer to the following arithmetic problem: 4 + 73 - 12 ="
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(ServedModel.open("pebble", max_length=1024, max_sequences=8)) as server:
        yield server


@pytest.fixture(scope="module")
def client(running: Running) -> openai.OpenAI:
    return running.client()


def chat(client: openai.OpenAI, **settings: Any) -> Any:
    return client.chat.completions.create(**{"model": "pebble", "messages": MESSAGES, **settings})


def streamed_texts(events: Any) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in events:
        for choice in event.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    return texts


def test_models_and_health(running: Running, client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, client.models.retrieve("pebble").id) == ("pebble", "pebble")
    assert running.backend.is_alive
    assert client.get("/../health", cast_to=object) == {"status": "ok"}


def test_greedy_tokens_are_those_of_transformers(running: Running, client: openai.OpenAI) -> None:
    sampler = running.served.sampler
    model: Any = AutoModelForCausalLM.from_pretrained(sampler.policy.lm.name_or_path)
    for question in (QUESTION, "7 + 5 ="):
        messages: list[Any] = [{"role": "user", "content": question}]
        ids = torch.tensor([sampler.encode(messages)])
        own = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False,
                             eos_token_id=list(sampler.policy.stop_token_ids), pad_token_id=0)  # fmt: skip
        expected = own[0, ids.shape[1] :].tolist()
        answer = chat(client, messages=messages, temperature=0, max_tokens=48,
                      extra_body={"return_token_ids": True})  # fmt: skip
        choice = answer.choices[0]
        stops = expected[-1:] if choice.finish_reason == "stop" else []
        assert [*choice.token_ids, *stops] == expected and answer.prompt_token_ids == ids[0].tolist()
        assert choice.message.content == sampler.chat.decode(expected)
        count = len(expected)
        assert answer.usage.completion_tokens == count
        assert answer.usage.total_tokens == ids.shape[1] + count


def test_streams_seeds_and_several_answers(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"n": 3, "seed": 7, "temperature": 1.2, "top_p": 0.9, "max_tokens": 24}
    whole = chat(client, **settings)
    texts = {choice.index: choice.message.content for choice in whole.choices}
    assert len(texts) == 3 and len(set(texts.values())) > 1
    assert [c.message.content for c in chat(client, **settings).choices] == list(texts.values())
    assert {c.message.content for c in chat(client, **{**settings, "seed": 8}).choices} != set(texts.values())
    events = list(chat(client, **settings, stream=True, stream_options={"include_usage": True}))
    assert streamed_texts(events) == texts
    assert events[-1].usage == whole.usage and events[-1].choices == []
    ends = {c.index: c.finish_reason for event in events for c in event.choices if c.finish_reason}
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}
    assert len(events) >= 7  # the role and the end of each, and the usage; more where nobody is slow


def test_stop_strings_end_an_answer(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 48}
    text = chat(client, **settings).choices[0].message.content
    stop = text[3:5]
    for stops in (stop, ["no such text", stop]):
        choice = chat(client, **settings, stop=stops).choices[0]
        assert choice.message.content == text[: text.index(stop)] and choice.finish_reason == "stop"
    assert streamed_texts(chat(client, **settings, stop=stop, stream=True)) == {0: text[: text.index(stop)]}


def test_logprobs_are_the_engines(running: Running, client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"temperature": 0.7, "top_p": 0.8, "max_tokens": 32, "seed": 5}
    expected = Sampler.open("pebble").sample(MESSAGES, n=2, **settings)
    whole = chat(client, **settings, n=2, logprobs=True)
    stream: list[list[float]] = [[], []]
    for event in chat(client, **settings, n=2, logprobs=True, stream=True):
        for choice in event.choices:
            entries = [] if choice.logprobs is None else choice.logprobs.content
            stream[choice.index] += [entry.logprob for entry in entries]
    for choice, answer in zip(whole.choices, expected, strict=True):
        count = len(choice.logprobs.content)
        assert count == len(answer.token_ids) - (choice.finish_reason == "stop")
        logprobs = [entry.logprob for entry in choice.logprobs.content]
        assert logprobs == pytest.approx(answer.logprobs[:count], abs=1e-4)
        assert stream[choice.index] == pytest.approx(logprobs, abs=1e-4)
        assert "".join(entry.token for entry in choice.logprobs.content) == answer.text


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_top_logprobs_are_those_of_transformers(
    is_stream: bool, running: Running, client: openai.OpenAI
) -> None:
    """Temperature and filters applied; tokens that a filter removes are not among them."""
    sampled = {"temperature": 0.7, "top_k": 3, "return_token_ids": True}
    settings: dict[str, Any] = {"max_tokens": 12, "seed": 5, "logprobs": True, "extra_body": sampled}
    whole = chat(client, **settings, top_logprobs=4)
    if is_stream:
        events = list(chat(client, **settings, top_logprobs=4, stream=True))
        choices = [choice for event in events for choice in event.choices if choice.logprobs]
        entries = [entry for choice in choices for entry in choice.logprobs.content]
    else:
        entries = whole.choices[0].logprobs.content
    ids, prompt = whole.choices[0].token_ids, whole.prompt_token_ids
    model: Any = AutoModelForCausalLM.from_pretrained(running.served.sampler.policy.lm.name_or_path)
    with torch.no_grad():
        rows = model(torch.tensor([[*prompt, *ids[:-1]]])).logits[0, len(prompt) - 1 :]
    assert len(entries) == len(ids) > 2
    for entry, row in zip(entries, rows / 0.7, strict=True):
        best = row.topk(3)
        expected = best.values.log_softmax(-1).tolist()
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(expected, abs=1e-4)
        assert [top.token for top in entry.top_logprobs] == [
            running.served.token_text(int(token)) for token in best.indices
        ]
        assert entry.token in {top.token for top in entry.top_logprobs}


def test_completions_of_texts_and_tokens(running: Running, client: openai.OpenAI) -> None:
    sampler = running.served.sampler
    ids = list(sampler.encode_text("4 + 7"))
    settings: dict[str, Any] = {"model": "pebble", "temperature": 0, "max_tokens": 8, "logprobs": 1}
    answer = client.completions.create(prompt=["4 + 7", "9 - 2"], **settings)
    assert [choice.index for choice in answer.choices] == [0, 1] and answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids) + len(sampler.encode_text("9 - 2"))
    same = client.completions.create(prompt=ids, **settings).choices[0]
    assert same.text == answer.choices[0].text
    logprobs: Any = same.logprobs
    assert "".join(logprobs.tokens) == same.text and len(logprobs.token_logprobs) == len(logprobs.tokens)
    for token, logprob, table in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert table == {token: logprob}  # greedy: the likeliest is the sampled one
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:n])) for n in range(len(logprobs.tokens))]
    events = client.completions.create(prompt="4 + 7", **settings, stream=True)
    assert "".join(choice.text for event in events for choice in event.choices) == same.text


@pytest.mark.parametrize(
    ("settings", "status", "param", "code"),
    [
        ({"model": "gpt-9"}, 404, "model", "model_not_found"),
        ({"temperature": -1}, 400, "temperature", "invalid_value"),
        ({"temperature": float("nan")}, 400, "temperature", "invalid_value"),
        ({"temperature": 1e-40}, 400, "temperature", "invalid_value"),
        ({"top_p": 0}, 400, "top_p", "invalid_value"),
        ({"top_p": 1e-7}, 400, "top_p", "invalid_value"),
        ({"min_p": 1e-300, "top_k": 10**7 + 1}, 400, "top_k", "invalid_value"),
        ({"n": 0}, 400, "n", "invalid_value"),
        ({"n": 10**6}, 400, "n", "invalid_value"),
        ({"max_tokens": 0}, 400, "max_tokens", "invalid_value"),
        ({"max_tokens": 5000}, 400, "messages", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "9" * 2000}]}, 400, "messages", "context_length_exceeded"),
        ({"messages": []}, 400, "messages", "invalid_value"),
        ({"messages": [{"role": "king", "content": "x"}]}, 400, "messages", None),
        ({"messages": [{"role": "user", "content": None}]}, 400, "messages", None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", None),
        ({"messages": [{"role": "assistant", "content": "x"}]}, 400, "messages", None),
        ({"stop": [3]}, 400, "stop", "invalid_value"),
        ({"frequency_penalty": 1.0}, 400, "frequency_penalty", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "invalid_value"),
        ({"top_logprobs": 5}, 400, "top_logprobs", None),
        ({"response_format": {"type": "json_object"}}, 400, "response_format", "invalid_value"),
        ({"tools": [{"type": "function"}]}, 400, "tools", None),
        ({"best_of_all": 1}, 400, "best_of_all", None),
    ],
)
def test_wrong_requests_get_openais_errors(
    running: Running, settings: dict[str, Any], status: int, param: str, code: str | None
) -> None:
    got, body = send(running, {"model": "pebble", "messages": MESSAGES, **settings})
    error = body["error"]
    assert got == status and error["message"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)


def send(running: Running, body: Any, path: str = "/v1/chat/completions", method: str = "POST") -> Any:
    """Status and body of a request as it is."""
    host, port = running.server.server_address[:2]
    connection = http.client.HTTPConnection(str(host), int(port), timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path, body if isinstance(body, bytes) else json.dumps(body))
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def test_other_errors(running: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist") as missing:
        chat(client, model="gpt-9")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        chat(client, top_p=3)
    assert wrong.value.param == "top_p"
    for body in (b"{", b"[]", b"[" * 100_000, b"\xff"):
        assert send(running, body)[0] == 400
    assert send(running, {}, "/v1/chat/completions", "GET")[0] == 405
    assert send(running, {}, "/v1/models")[0] == 405
    assert send(running, {}, "/v1/nothing")[0] == 404
    host, port = running.server.server_address[:2]
    with socket.create_connection((str(host), int(port)), timeout=60) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 413")
    with socket.create_connection((str(host), int(port)), timeout=60) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 403")


ASK = b"POST /v1/completions HTTP/1.1\r\n"
BODY = b'{"model": "pebble", "prompt": "1 + 1", "max_tokens": 1}'
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
LOCAL = b"Host: localhost\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (ASK + LOCAL + LENGTH + b"\r\n" + BODY, 200),
        (ASK + LOCAL + LENGTH + b"Origin: http://localhost\r\n\r\n" + BODY, 200),
        (ASK + LOCAL + LENGTH + b"Origin: http://evil.example\r\n\r\n" + BODY, 403),
        (ASK + LOCAL + LENGTH + b"Origin: null\r\n\r\n" + BODY, 403),
        (ASK + LOCAL + LENGTH + b"Sec-Fetch-Site: cross-site\r\n\r\n" + BODY, 403),
        (ASK + LOCAL + LENGTH + b"Sec-Fetch-Site: same-site\r\n\r\n" + BODY, 403),
        (ASK + b"Host: evil:80@localhost\r\n" + LENGTH + b"\r\n" + BODY, 403),
        (ASK + b"Host: [\r\n" + LENGTH + b"\r\n" + BODY, 403),
        (ASK + b"Host: evil.example\r\nContent-Length: 30000000\r\n\r\n", 403),  # none of it was sent
        (ASK + LOCAL + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", 413),
        (ASK + LOCAL + b"Content-Length: -1\r\n\r\n", 400),
        (ASK + LOCAL + LENGTH + b"Content-Length: 5\r\n\r\n" + BODY, 400),
        (ASK + LOCAL + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411),
        (b"GET http://[/ HTTP/1.1\r\n" + LOCAL + b"\r\n", 400),
        (b"nonsense\r\n\r\n", 400),
        (b"GET /health\r\n\r\n", 200),  # as before HTTP/1.0
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n", 414),
        (b"BREW /health HTTP/1.1\r\n" + LOCAL + b"\r\n", 501),
        (b"HEAD /health HTTP/1.1\r\n" + LOCAL + b"\r\n", 405),
    ],
)
def test_every_request_gets_a_status_by_its_headers(running: Running, sent: bytes, status: int) -> None:
    host, port = running.server.server_address[:2]
    with socket.create_connection((str(host), int(port)), timeout=60) as connection:
        connection.sendall(sent)
        answer = connection.recv(4096)
    assert answer.split(b" ", 2)[:2] in ([b"HTTP/1.1", b"%d" % status], [b"HTTP/1.0", b"%d" % status])


def test_what_is_not_read_is_no_request(running: Running) -> None:
    """The body of a GET; a body that was refused; one that is read by the client's half."""
    host, port = running.server.server_address[:2]
    inner = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for head in (b"GET /health HTTP/1.1\r\n" + LOCAL, b"POST /v1/nothing HTTP/1.1\r\n" + LOCAL):
        with socket.create_connection((str(host), int(port)), timeout=60) as connection:
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(inner) + inner)
            answers = b"".join(iter(lambda: connection.recv(65_536), b""))
        assert answers.count(b"HTTP/1.1 ") == 1 and b"Connection: close" in answers


def test_the_sum_of_all_bodies_is_bounded(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_BODIES", 200_000)
    host, port = running.server.server_address[:2]
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection((str(host), int(port)), 60)) for _ in range(3)]
        for connection in slow[:2]:
            connection.sendall(ASK + LOCAL + b"Content-Length: 100000\r\n\r\n" + b" " * 90_000)
        wait_until(lambda: running.server.num_bytes >= 180_000)
        slow[2].sendall(ASK + LOCAL + b"Content-Length: 100000\r\n\r\n" + b" " * 90_000)
        assert slow[2].recv(100).startswith(b"HTTP/1.1 503")
    wait_until(lambda: running.server.num_bytes == 0)
    assert send(running, json.loads(BODY), "/v1/completions")[0] == 200


def test_a_request_has_a_time_to_arrive(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then does not keep a connection."""
    monkeypatch.setattr(http_server, "ARRIVAL_S", 0.3)
    host, port = running.server.server_address[:2]
    for start, status in ((ASK + LOCAL + b"Content-Length: 90\r\n\r\n", b"HTTP/1.1 408"), (ASK, b"")):
        with socket.create_connection((str(host), int(port)), timeout=60) as connection:
            connection.sendall(start)
            for _ in range(8):
                time.sleep(0.1)
                with contextlib.suppress(OSError):
                    connection.sendall(b"x")
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(100)[:12] == status


def test_an_api_key(running: Running) -> None:
    server = running.server
    server.api_key = "secret"
    try:
        with pytest.raises(openai.AuthenticationError):
            running.client("wrong").models.list()
        assert running.client("secret").models.list().data
        assert running.client("wrong").get("/../health", cast_to=object) == {"status": "ok"}
    finally:
        server.api_key = None


def test_forty_clients_of_which_some_vanish(running: Running, client: openai.OpenAI) -> None:
    """Eight slots: most wait. Every fourth client leaves, before or while it is answered."""
    questions = [f"{number} + {3 * number} - 12 =" for number in range(40)]

    def ask(number: int) -> str | None:
        messages = [{"role": "user", "content": questions[number]}]
        settings = {"messages": messages, "seed": number, "temperature": 1.0, "max_tokens": 40}
        if number % 4 == 0:
            vanish(running, {"model": "pebble", **settings, "max_tokens": 900, "ignore_eos": True,
                             "stream": number % 8 == 0})  # fmt: skip
            return None
        if number % 4 == 1:
            return streamed_texts(chat(client, **settings, stream=True))[0]
        return chat(client, **settings).choices[0].message.content

    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(ask, range(40)))
    for number in (1, 2, 3, 21, 39):
        messages = [{"role": "user", "content": questions[number]}]
        alone = chat(client, messages=messages, seed=number, temperature=1.0, max_tokens=40)
        assert answers[number] == alone.choices[0].message.content
    assert all(answers[number] is not None for number in range(40) if number % 4)
    wait_until(lambda: running.backend.load().num_samples == 0)
    assert chat(client, max_tokens=1, temperature=0).choices[0].finish_reason == "length"


def vanish(running: Running, body: dict[str, Any]) -> None:
    """Send a request and leave; a stream after its first bytes."""
    host, port = running.server.server_address[:2]
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection((str(host), int(port)), timeout=60) as connection:
        connection.sendall(head.encode() + content)
        if body["stream"]:
            connection.recv(10)


def test_the_end_of_a_server_ends_its_answers(running: Running) -> None:
    with serving(running.served) as other:
        stream = chat(other.client(), temperature=1, max_tokens=900, stream=True,
                      extra_body={"ignore_eos": True})  # fmt: skip
        next(iter(stream))
        other.backend.stop(0)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            chat(other.client())
        with pytest.raises(openai.InternalServerError):
            other.client().get("/../health", cast_to=object)


def generate(running: Running, **changes: Any) -> tuple[int, Any]:
    body = {"token_ids": list(running.served.sampler.encode(MESSAGES)), "sampling_params": {}, **changes}
    return send(running, body, "/inference/v1/generate")


def test_tokens_in_tokens_out_as_vllm_has_it(running: Running, client: openai.OpenAI) -> None:
    """`/inference/v1/generate`: the tokens of the chat endpoint, the stop token included."""
    chosen = chat(client, temperature=0, max_tokens=48, extra_body={"return_token_ids": True}).choices[0]
    params = {"temperature": 0.0, "max_tokens": 48, "logprobs": 1, "skip_special_tokens": False}
    status, answer = generate(running, sampling_params=params, request_id="mine")
    (choice,) = answer["choices"]
    ids = choice["token_ids"]
    assert status == 200 and answer["request_id"] == "mine" and choice["finish_reason"] == "stop"
    assert ids[:-1] == chosen.token_ids and ids[-1] in running.served.codec.stop_ids
    assert answer["usage"]["completion_tokens"] == len(ids)
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{n}" for n in ids]
    _, cut = generate(running, sampling_params={**params, "stop_token_ids": [ids[3]]})
    assert cut["choices"][0]["token_ids"] == ids[: ids.index(ids[3]) + 1]
    _, several = generate(running, sampling_params={"n": 3, "seed": 1, "max_tokens": 4})
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
    assert several["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [10**9]}, "prompt"),
        ({"sampling_params": {"logprobs": 5}}, "sampling_params.logprobs"),
        ({"sampling_params": {"guided_json": {}}}, "sampling_params.guided_json"),
        ({"stream": True}, "stream"),
    ],
)
def test_what_tokens_in_tokens_out_refuses(running: Running, changes: dict[str, Any], param: str) -> None:
    status, body = generate(running, **changes)
    assert status == 400 and body["error"]["param"] == param


def test_failures_of_requests_do_not_end_the_server(running: Running, client: openai.OpenAI) -> None:
    """A prompt that the engine can't take gets past the checks: 503 to all of that moment, and it goes on."""
    expected = chat(client, seed=1, max_tokens=24).choices[0].message.content
    params = SamplingParams(max_tokens=1)
    broken = GenerationRequest(prompt_ids=(10**9,), seeds=(0,), sampling=params)
    for _ in range(4):  # in a row, with nothing that succeeds between them
        stream = running.backend.submit(broken)
        with pytest.raises(BackendUnavailable, match="engine failed"):
            while True:
                stream.read(1.0)
    for _ in range(5):
        neighbor = running.backend.submit(
            replace(broken, prompt_ids=(3,), sampling=replace(params, max_tokens=900))
        )
        stream = running.backend.submit(broken)
        with pytest.raises(BackendUnavailable, match="engine failed"):
            while True:
                stream.read(1.0)
        # A client of before notices only now, and another's request has its number by then.
        answer = running.backend.submit(replace(broken, prompt_ids=(3,)))
        neighbor.cancel()
        chunks = [*answer.read(20.0)]
        assert chunks and chunks[0].finish
    assert running.backend.is_alive
    assert chat(client, seed=1, max_tokens=24).choices[0].message.content == expected
