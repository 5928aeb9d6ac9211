"""Agents for the tests, with OpenAI's own client."""

import asyncio
import json
import os
import threading
import time
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import openai
import openai.resources.chat.completions  # before the agents are forked

from tests.support.http_fuzz import bombard

AGAIN = {"role": "user", "content": "Are you sure?"}


def spread(completions: list[Any], **_: Any) -> list[float]:
    """A reward that differs among answers: the gradient is not 0."""
    return [sum(map(ord, messages[-1]["content"])) % 7 / 7 for messages in completions]


def client(base_url: str) -> openai.OpenAI:
    plain = openai.DefaultHttpxClient(verify=False, timeout=60)  # certificates take time to load
    return openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, http_client=plain)


def ask(base_url: str, messages: list[Any], **options: Any) -> Any:
    return client(base_url).chat.completions.create(model="policy", messages=messages, **options)


def twice(base_url: str, problem: dict[str, Any]) -> None:
    """Two turns; the last one is scored."""
    messages = list(problem["messages"])
    first = ask(base_url, messages).choices[0].message
    messages += [first.model_dump(exclude_none=True), AGAIN]
    ask(base_url, messages)


def besieged(base_url: str, problem: dict[str, Any]) -> None:
    """Malformed requests to its own session, then two turns."""
    url = urlsplit(base_url)
    routes = [("POST", f"{url.path}/chat/completions", None), ("GET", f"{url.path}/models", None)]
    bombard((str(url.hostname), url.port or 0), 40, len(problem["id"]), routes, threads=2)
    twice(base_url, problem)


async def streams(base_url: str, problem: dict[str, Any], model: str, seed: int) -> str:
    """Streams two turns; answers what it was told."""
    assert os.environ["OPENAI_BASE_URL"] == base_url and model == "policy" and seed >= 0
    messages, text = list(problem["messages"]), ""
    async with openai.AsyncOpenAI(api_key="none", max_retries=0) as own:
        for _ in range(2):
            text, usage = "", None
            events = await own.chat.completions.create(
                model="any", messages=messages, stream=True, stream_options={"include_usage": True}
            )
            async for event in events:
                usage = event.usage or usage
                text += "".join(choice.delta.content or "" for choice in event.choices)
            assert usage is not None and usage.completion_tokens > 0
            messages += [{"role": "assistant", "content": f" {text}\n"}, AGAIN]
    return f"<answer>{problem['answer']}</answer>" if problem["id"].endswith("0") else text


def stops(base_url: str, problem: dict[str, Any]) -> None:
    """Cuts its first turn at a text, and its second at a number of tokens."""
    messages = list(problem["messages"])
    first = ask(base_url, messages, stop=">").choices[0]
    assert first.finish_reason == "stop" and ">" not in first.message.content
    messages += [{"role": "assistant", "content": first.message.content}, AGAIN]
    second = ask(base_url, messages, max_tokens=3, logprobs=True).choices[0]
    assert second.finish_reason == "length" and len(second.logprobs.content) == 3
    messages += [{"role": "assistant", "content": second.message.content}, AGAIN]
    ask(base_url, messages, max_completion_tokens=2)


def tokens(base_url: str, problem: dict[str, Any]) -> None:
    """Tokens in, tokens out; one turn by messages before."""
    options = {"logprobs": True, "extra_body": {"return_token_ids": True}}
    first = ask(base_url, list(problem["messages"]), **options)
    choice = first.choices[0]
    prompt = first.prompt_token_ids + choice.token_ids
    stop = [] if choice.finish_reason == "length" else [problem["stop_id"]]
    url = base_url.removesuffix("/v1") + "/inference/v1/generate"
    ids = [*prompt, *stop, *problem["suffix"]]
    answer = post(url, {"token_ids": ids, "sampling_params": {"max_tokens": 8, "logprobs": 0}})
    (choice,) = answer["choices"]
    assert 0 < len(choice["token_ids"]) == len(choice["logprobs"]["content"]) <= 8


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def tools(base_url: str, problem: dict[str, Any]) -> str | None:
    """A loop with a tool."""
    messages = list(problem["messages"])
    while True:
        said = ask(base_url, messages, tools=problem["tools"]).choices[0].message
        messages.append(said.model_dump())
        if not said.tool_calls:
            return None
        for call in said.tool_calls:
            values = json.loads(call.function.arguments)
            result = str(values["a"] + values["b"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def endless(base_url: str, problem: dict[str, Any]) -> None:
    """Asks until it is refused."""
    messages = list(problem["messages"])
    while True:
        said = ask(base_url, messages, max_tokens=2).choices[0].message.content
        messages += [{"role": "assistant", "content": said}, AGAIN]


def gives_up(base_url: str, problem: dict[str, Any]) -> str:
    try:
        endless(base_url, problem)
    except openai.BadRequestError as error:
        assert error.code == "max_completion_length"
    return "done"


def long(base_url: str, problem: dict[str, Any]) -> str:
    """Overflows the context, shortens its message and goes on."""
    try:
        ask(base_url, [{"role": "user", "content": "7 + 5 = " * 400}])
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded"
    ask(base_url, list(problem["messages"]))
    return "done"


def too_long(base_url: str, problem: dict[str, Any]) -> None:
    ask(base_url, [{"role": "user", "content": "7 + 5 = " * 400}])


def returns_meanwhile(base_url: str, problem: dict[str, Any]) -> str:
    """Ends while the policy is still being asked for a second turn."""
    messages = list(problem["messages"])
    first = ask(base_url, messages).choices[0].message
    messages += [first.model_dump(exclude_none=True), AGAIN]
    threading.Thread(target=ask, args=(base_url, messages), daemon=True).start()
    time.sleep(0.02)
    return "done"


# Agents whose requests do not extend what there was.
SHORT = {"role": "assistant", "content": "I was thinking."}


def forgets(base_url: str, problem: dict[str, Any]) -> None:
    """Replaces what the policy said first, goes on from there, and replaces what it said then."""
    messages = list(problem["messages"])
    ask(base_url, messages, max_tokens=12)
    messages += [SHORT, AGAIN]
    said = ask(base_url, messages, max_tokens=12).choices[0].message.content
    ask(base_url, [*messages, {"role": "assistant", "content": said}, AGAIN], max_tokens=6)
    ask(base_url, [*messages, SHORT, AGAIN])


def edits_system(base_url: str, problem: dict[str, Any]) -> None:
    question = problem["messages"][-1]
    for number in range(3):
        ask(base_url, [{"role": "system", "content": f"{number} turns so far."}, question], max_tokens=8)


def delegates(base_url: str, problem: dict[str, Any]) -> None:
    """Has a second conversation, and then goes on with the first."""
    messages = list(problem["messages"])
    said = ask(base_url, messages, max_tokens=12).choices[0].message.content
    ask(base_url, [{"role": "user", "content": "Is 7 a prime?"}], max_tokens=6)
    ask(base_url, [*messages, {"role": "assistant", "content": said}, AGAIN])


def sends_tokens_anew(base_url: str, problem: dict[str, Any]) -> None:
    """Tokens of its own in the second turn, and the first turn's tokens with more in the third."""
    options = {"max_tokens": 6, "extra_body": {"return_token_ids": True}}
    first = ask(base_url, list(problem["messages"]), **options)
    url = base_url.removesuffix("/v1") + "/inference/v1/generate"
    post(url, {"token_ids": [*problem["suffix"], 9, 11], "sampling_params": {"max_tokens": 5}})
    choice = first.choices[0]
    stop = [] if choice.finish_reason == "length" else [problem["stop_id"]]
    ids = first.prompt_token_ids + choice.token_ids + stop
    post(url, {"token_ids": ids, "sampling_params": {"max_tokens": 5}})


# What bad agents do, and what is said about them.
def raises(base_url: str, problem: dict[str, Any]) -> None:
    ask(base_url, list(problem["messages"]))
    raise ValueError("no idea")


def raises_at_once(base_url: str, problem: dict[str, Any]) -> None:
    raise KeyError("prompt")


def exits(base_url: str, problem: dict[str, Any]) -> None:
    ask(base_url, list(problem["messages"]))
    os._exit(0)


def hangs(base_url: str, problem: dict[str, Any]) -> None:
    ask(base_url, list(problem["messages"]))
    time.sleep(600)


def retries_forever(base_url: str, problem: dict[str, Any]) -> None:
    while True:
        try:
            ask(base_url, list(problem["messages"]))
        except openai.APIError:
            time.sleep(0.05)


def eats_memory(base_url: str, problem: dict[str, Any]) -> None:
    bytearray(1 << 34)


def returns_a_number(base_url: str, problem: dict[str, Any]) -> Any:
    ask(base_url, list(problem["messages"]))
    return 42


def never_asks(base_url: str, problem: dict[str, Any]) -> str:
    return f"<answer>{problem['answer']}</answer>"


def asks_for_two(base_url: str, problem: dict[str, Any]) -> None:
    ask(base_url, list(problem["messages"]), n=2)


def sends_nonsense(base_url: str, problem: dict[str, Any]) -> None:
    post(f"{base_url}/chat/completions", ["no body"])


def wrong_tokens(base_url: str, problem: dict[str, Any]) -> None:
    url = base_url.removesuffix("/v1") + "/inference/v1/generate"
    post(url, {"token_ids": [10**9], "sampling_params": {}})


def guesses_a_session(base_url: str, problem: dict[str, Any]) -> None:
    ask(base_url.replace("/sessions/", "/sessions/0"), list(problem["messages"]))


def asks_at_once(base_url: str, problem: dict[str, Any]) -> None:
    """A repetition waits, and gets the first one's answer. The same question asked on purpose is a turn."""

    async def both() -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as own:
            messages = list(problem["messages"])
            create, marked = own.chat.completions.create, {"x-stainless-retry-count": "1"}
            calls = [create(model="policy", messages=messages, extra_headers=marked) for _ in range(2)]
            first, second = await asyncio.gather(*calls)
            assert first.choices[0].message.content == second.choices[0].message.content
            await create(model="policy", messages=messages)

    asyncio.run(both())


def leaves(base_url: str, problem: dict[str, Any]) -> None:
    """Closes its connection at once, and asks anew."""
    impatient = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=0.001)
    try:
        impatient.chat.completions.create(model="policy", messages=list(problem["messages"]))
    except openai.APITimeoutError:
        time.sleep(0.6)
    ask(base_url, list(problem["messages"]))


BAD = {
    "raises": "ValueError: no idea (agents.py, line",
    "raises_at_once": "KeyError: 'prompt'",
    "exits": "its process has ended",
    "hangs": "no request and no answer in 4 s",
    "retries_forever": "no request and no answer in 4 s",
    "eats_memory": "out of memory",
    "returns_a_number": "returned int",
    "never_asks": "never asked the policy",
    "asks_for_two": "one answer at a time",
    "sends_nonsense": "HTTP Error 400",
    "wrong_tokens": "HTTP Error 400",
    "guesses_a_session": "no such session",
}


def any_of(base_url: str, problem: dict[str, Any]) -> Any:
    """The agent that a test names in the row: one pool of processes for all tests."""
    return globals()[problem["agent"]](base_url, problem, **problem.get("more", {}))
