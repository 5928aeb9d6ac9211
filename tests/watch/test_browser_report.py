"""report.html in Chromium, as a file: the same components, no request, no script but its own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.watch.pages import (
    HOSTILE,
    attribute,
    choose,
    click,
    completions_of,
    count,
    facts,
    is_quiet,
    press,
    requests_away,
    rows_of,
    text,
    texts,
    until,
)
from whetstone.report import write_report

pytestmark = pytest.mark.browser


@pytest.fixture
def opened(browser: Any) -> Callable[[Path], None]:
    def open_report(path: Path) -> None:
        browser.get("about:blank")
        browser.get_log("performance")
        browser.get(path.as_uri())
        until(lambda: attribute(browser, "html", "data-ready"))
        browser.execute_script("document.querySelectorAll('details.view').forEach((d) => { d.open = true; })")

    return open_report


def test_the_report_has_curves_groups_and_tokens_offline(browser: Any, opened: Callable, ruled: Path) -> None:
    opened(write_report(ruled))
    rows = rows_of(ruled)
    label = str(attribute(browser, "figure[data-metric='grad_norm'] svg", "aria-label"))
    assert float(label.rsplit(" ", 1)[1]) == pytest.approx(rows[-1]["grad_norm"], rel=1e-3)
    click(browser, "figure[data-metric='grad_norm'] details summary")
    until(lambda: count(browser, "figure[data-metric='grad_norm'] tbody tr") == len(rows))
    shown = [float(cell) for cell in texts(browser, "figure[data-metric='grad_norm'] tbody td")]
    assert shown == pytest.approx([row["grad_norm"] for row in rows], rel=1e-3)
    document = json.loads((ruled / "eval_results" / "eval_step_6.json").read_text())
    assert count(browser, "#tasks tbody tr") == len(document["summary"]["per_task"])
    # Groups with the numbers of tokens.
    written = completions_of(ruled, 6)
    assert count(browser, ".list button") == len({row["problem"] for row in written})
    with np.load(ruled / "completions" / "tokens_6.npz") as file:
        description = json.loads(file["description"].tobytes())
        entropy = file["numbers"][description["columns"].index("entropy"), 0]
    first = description["completions"][0]
    click(browser, f".list button[data-problem='{first['problem']}']")
    until(lambda: text(browser, "section h2") == first["problem"])
    card = f".completion[aria-label='sample {first['sample']}']"
    press(browser, f"{card} .strip", "Home")
    assert float(facts(browser, f"{card} .numbers")["entropy"]) == pytest.approx(entropy, rel=2e-3, abs=1e-5)
    choose(browser, "filter", "truncated")
    cut = {row["problem"] for row in written if row["finish"] == "length"}
    until(lambda: count(browser, ".list button") == len(cut))
    # Before and after, and one problem at each evaluation.
    problems = {row["problem"] for row in document["completions"]}
    assert count(browser, ".pairs tbody tr") == len(problems)
    click(browser, ".pairs tbody button")
    until(lambda: count(browser, "#problem tbody tr") == 4)
    assert is_quiet(browser)


def test_hostile_text_does_nothing_in_the_report(
    browser: Any, opened: Callable, ruled: Path, tmp_path: Path
) -> None:
    """In completions, prompts, answers, tokens, problems and tasks; and what got into the file can't run."""
    folder = tmp_path / "bad"
    for name in ("completions", "eval_results"):
        (folder / name).mkdir(parents=True)
    for name in ("metrics.jsonl", "config.yaml"):
        (folder / name).write_bytes((ruled / name).read_bytes())
    for path in (ruled / "eval_results").glob("*.json"):
        document = json.loads(path.read_text())
        tasks = document["summary"]["per_task"]
        document["summary"]["per_task"] = {HOSTILE: next(iter(tasks.values()))}
        for row in document["completions"]:
            row |= {"completion": HOSTILE, "answer": HOSTILE, "gold": HOSTILE, "task": HOSTILE}
            row["messages"] = [{"role": "user", "content": HOSTILE}]
        (folder / "eval_results" / path.name).write_text(json.dumps(document))
    row = completions_of(ruled, 6)[0]
    row |= {"problem": HOSTILE, "completion": HOSTILE, "answer": HOSTILE, "failure": HOSTILE, "task": HOSTILE}
    row["messages"] = [{"role": HOSTILE, "content": HOSTILE}]
    (folder / "completions" / "step_6.jsonl").write_text(json.dumps(row) + "\n")
    path = write_report(folder)
    content = path.read_text()
    assert content.count("</script") == 2 and "<img" not in content
    opened(path)
    assert "window.hit=1" in text(browser, ".completion") and "window.hit=1" in text(browser, ".pairs")
    assert browser.execute_script("return window.hit") is None
    assert count(browser, "main img, main script, main iframe, main svg[onload]") == 0
    assert not {"\u202e", "\x1b", "\x00"} & set(text(browser))
    assert is_quiet(browser)
    # Markup in the file itself: the policy names the page's own script and style alone.
    injected = "<script>window.hit=1</script><img src=x onerror='window.hit=1'>"
    injected += "<img src='http://192.0.2.1/x.png'>"
    path.write_text(content.replace("<main>", f"<main>{injected}"))
    opened(path)
    assert browser.execute_script("return window.hit") is None
    refused = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert set(requests_away(browser).values()) <= {"csp"}  # noticed by the browser, and not sent
    assert len(refused) >= 4 and all("Content Security Policy" in message for message in refused)
    assert count(browser, "figure[data-metric]")  # the page itself still works
