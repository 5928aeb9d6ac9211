"""An agent of two turns that needs the standard library only: it runs on every machine with a GPU."""

import json
import urllib.request
from typing import Any


def ask(base_url: str, messages: list[Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]["message"]


def twice(base_url: str, problem: dict[str, Any]) -> None:
    messages = list(problem["messages"])
    messages += [ask(base_url, messages), {"role": "user", "content": "Are you sure?"}]
    ask(base_url, messages)


def spread(completions: list[Any], **_: Any) -> list[float]:
    """A reward that differs among answers, so that there is a gradient."""
    return [sum(map(ord, messages[-1]["content"])) % 7 / 7 for messages in completions]
