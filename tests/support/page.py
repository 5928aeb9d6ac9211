"""A page in a browser: open it, read it, choose; and the files of runs to compare it with."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tests.support.waiting import wait_until

HOSTILE = (
    "<img src=x onerror='window.hit=1'><script>window.hit=1</script></script><!--\u202eabc\x1b[2J\x00"
    '"><svg onload=window.hit=1>{{7*7}}\u2066 &lt;b&gt; javascript:window.hit=1'
)
UNSEEN = {"\u202e", "\x1b", "\x00", "\u2066"}  # of HOSTILE: characters that must be spelled out


class Page:
    """What the browser shows. Selectors are those of CSS; the first match counts."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser  # of Selenium

    def show(self, address: str, **parts: str) -> None:
        self.browser.get("about:blank")
        self.browser.get(f"{address}/#{urlencode(parts)}")

    def show_report(self, path: Path) -> None:
        """report.html with all of its views open."""
        self.browser.get("about:blank")
        self.browser.get_log("performance")
        self.browser.get(path.as_uri())
        wait_until(lambda: self.attribute("html", "data-ready"))
        self.script("document.querySelectorAll('details.view').forEach((d) => { d.open = true; })")

    def script(self, code: str, *arguments: Any) -> Any:
        return self.browser.execute_script(code, *arguments)

    def text(self, selector: str = "body") -> str:
        return self.script("return document.querySelector(arguments[0])?.innerText ?? ''", selector)

    def texts(self, selector: str) -> list[str]:
        code = "return [...document.querySelectorAll(arguments[0])].map((node) => node.innerText)"
        return self.script(code, selector)

    def count(self, selector: str) -> int:
        return self.script("return document.querySelectorAll(arguments[0]).length", selector)

    def attribute(self, selector: str, name: str) -> str | None:
        return self.script(
            "return document.querySelector(arguments[0])?.getAttribute(arguments[1])", selector, name
        )

    def newest(self, metric: str) -> float:
        """The last value of a chart, as a screen reader hears it."""
        label = str(self.attribute(f"figure[data-metric='{metric}'] svg", "aria-label"))
        return float(label.rsplit(" ", 1)[1].replace(",", ""))

    def choose(self, label: str, value: str) -> None:
        """Choose in a `select`, or write into a field, as a person does."""
        self.script(
            "const box = document.querySelector(`[aria-label='${arguments[0]}']`);"
            "box.value = arguments[1]; box.dispatchEvent(new Event('change', {bubbles: true}))",
            label,
            value,
        )

    def click(self, selector: str) -> None:
        self.script("document.querySelector(arguments[0]).click()", selector)

    def click_button(self, text: str) -> None:
        """The button whose text begins so."""
        self.script(
            "const [name] = arguments;"
            "[...document.querySelectorAll('button')].find((b) => b.innerText.startsWith(name)).click()",
            text,
        )

    def press(self, selector: str, *keys: str) -> None:
        for key in keys:
            self.script(
                "const node = document.querySelector(arguments[0]); node.focus();"
                "node.dispatchEvent(new KeyboardEvent('keydown', {key: arguments[1], bubbles: true}))",
                selector,
                key,
            )

    def facts(self, selector: str) -> dict[str, str]:
        """The terms of a `dl`, by name."""
        return self.script(
            "return Object.fromEntries([...document.querySelectorAll(`${arguments[0]} dt`)].map("
            "(dt) => [dt.innerText, dt.nextElementSibling.innerText]))",
            selector,
        )

    def check_harmless(self) -> None:
        """HOSTILE is on the page as text: nothing of it ran, became an element or is invisible."""
        assert self.script("return window.hit") is None
        assert self.count("main img, main script, main iframe, main svg[onload], main b b") == 0
        assert not UNSEEN & set(self.text())

    def is_quiet(self) -> bool:
        """Nothing failed, nothing was refused, and every request of the page went to this machine."""
        assert self.errors() == [] and self.requests_away() == {}
        return True

    def errors(self) -> list[str]:
        """What the browser logged as an error since the last call."""
        return [entry["message"] for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]

    def requests_away(self) -> dict[str, str | None]:
        """Address -> why it was blocked, of requests to other machines since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self.browser.get_log("performance")]
        events = [(message["method"], message["params"]) for message in messages]
        blocked = {
            p["requestId"]: p.get("blockedReason")
            for method, p in events
            if method == "Network.loadingFailed"
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
