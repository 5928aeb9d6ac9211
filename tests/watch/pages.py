"""What the browser tests do with a page: open it, read it, choose."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

HOSTILE = (
    "<img src=x onerror='window.hit=1'><script>window.hit=1</script></script><!--\u202eabc\x1b[2J\x00"
    '"><svg onload=window.hit=1>{{7*7}}\u2066 &lt;b&gt; javascript:window.hit=1'
)


def show(browser: Any, address: str, **parts: str) -> None:
    browser.get("about:blank")
    browser.get(f"{address}/#{urlencode(parts)}")


def text(browser: Any, selector: str = "body") -> str:
    return browser.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", selector)


def texts(browser: Any, selector: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map((node) => node.innerText)"
    return browser.execute_script(script, selector)


def count(browser: Any, selector: str) -> int:
    return browser.execute_script("return document.querySelectorAll(arguments[0]).length", selector)


def attribute(browser: Any, selector: str, name: str) -> str | None:
    script = "return document.querySelector(arguments[0])?.getAttribute(arguments[1])"
    return browser.execute_script(script, selector, name)


def choose(browser: Any, label: str, value: str) -> None:
    """Choose in a `select`, or write into a field, as a person does."""
    browser.execute_script(
        "const box = document.querySelector(`[aria-label='${arguments[0]}']`);"
        "box.value = arguments[1]; box.dispatchEvent(new Event('change', {bubbles: true}))",
        label,
        value,
    )


def click(browser: Any, selector: str) -> None:
    browser.execute_script("document.querySelector(arguments[0]).click()", selector)


def press(browser: Any, selector: str, *keys: str) -> None:
    for key in keys:
        browser.execute_script(
            "const node = document.querySelector(arguments[0]); node.focus();"
            "node.dispatchEvent(new KeyboardEvent('keydown', {key: arguments[1], bubbles: true}))",
            selector,
            key,
        )


def until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return value


def facts(browser: Any, selector: str) -> dict[str, str]:
    """The terms of a `dl`, by name."""
    script = (
        "return Object.fromEntries([...document.querySelectorAll(`${arguments[0]} dt`)].map("
        "(dt) => [dt.innerText, dt.nextElementSibling.innerText]))"
    )
    return browser.execute_script(script, selector)


def is_quiet(browser: Any) -> bool:
    """Nothing failed, nothing was refused, and every request of the page went to this machine."""
    logged = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert logged == [] and requests_away(browser) == {}
    return True


def requests_away(browser: Any) -> dict[str, str | None]:
    """Address -> why it was blocked, of requests to other machines since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    events = [(message["method"], message["params"]) for message in messages]
    blocked = {
        p["requestId"]: p.get("blockedReason") for method, p in events if method == "Network.loadingFailed"
    }
    return {
        p["request"]["url"]: blocked.get(p["requestId"])
        for method, p in events
        if method == "Network.requestWillBeSent"
        and not p["request"]["url"].startswith(("http://127.0.0.1:", "file:", "data:", "about:"))
    }


def rows_of(folder: Path, kind: str = "train") -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def completions_of(folder: Path, step: int) -> list[dict]:
    lines = (folder / "completions" / f"step_{step}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
