"""report.html in Chromium, as a file: the same components, no request, no script but its own."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.page import HOSTILE, Page, completions_of, rows_of
from tests.support.waiting import wait_until
from whetstone.report import write_report

pytestmark = pytest.mark.browser


def test_the_report_has_curves_groups_and_tokens_offline(page: Page, ruled: Path) -> None:
    page.show_report(write_report(ruled))
    rows = rows_of(ruled)
    assert page.newest("grad_norm") == pytest.approx(rows[-1]["grad_norm"], rel=1e-3)
    page.click("figure[data-metric='grad_norm'] details summary")
    wait_until(lambda: page.count("figure[data-metric='grad_norm'] tbody tr") == len(rows))
    shown = [float(cell) for cell in page.texts("figure[data-metric='grad_norm'] tbody td")]
    assert shown == pytest.approx([row["grad_norm"] for row in rows], rel=1e-3)
    document = json.loads((ruled / "eval_results" / "eval_step_6.json").read_text())
    assert page.count("#tasks tbody tr") == len(document["summary"]["per_task"])
    # Groups with the numbers of tokens.
    written = completions_of(ruled, 6)
    assert page.count(".list button") == len({row["problem"] for row in written})
    with np.load(ruled / "completions" / "tokens_6.npz") as file:
        description = json.loads(file["description"].tobytes())
        entropy = file["numbers"][description["columns"].index("entropy"), 0]
    first = description["completions"][0]
    page.click(f".list button[data-problem='{first['problem']}']")
    wait_until(lambda: page.text("section h2") == first["problem"])
    card = f".completion[aria-label='sample {first['sample']}']"
    page.press(f"{card} .strip", "Home")
    assert float(page.facts(f"{card} .numbers")["entropy"]) == pytest.approx(entropy, rel=2e-3, abs=1e-5)
    page.choose("filter", "truncated")
    cut = {row["problem"] for row in written if row["finish"] == "length"}
    wait_until(lambda: page.count(".list button") == len(cut))
    # Before and after, and one problem at each evaluation.
    problems = {row["problem"] for row in document["completions"]}
    assert page.count(".pairs tbody tr") == len(problems)
    page.click(".pairs tbody button")
    wait_until(lambda: page.count("#problem tbody tr") == 4)
    assert page.is_quiet()


def test_hostile_text_does_nothing_in_the_report(page: Page, ruled: Path, tmp_path: Path) -> None:
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
    page.show_report(path)
    assert "window.hit=1" in page.text(".completion") and "window.hit=1" in page.text(".pairs")
    page.check_harmless()
    assert page.is_quiet()
    # Markup in the file itself: the policy names the page's own script and style alone.
    injected = "<script>window.hit=1</script><img src=x onerror='window.hit=1'>"
    injected += "<img src='http://192.0.2.1/x.png'>"
    path.write_text(content.replace("<main>", f"<main>{injected}"))
    page.show_report(path)
    assert page.script("return window.hit") is None
    refused = page.errors()
    assert set(page.requests_away().values()) <= {"csp"}  # noticed by the browser, and not sent
    assert len(refused) >= 4 and all("Content Security Policy" in message for message in refused)
    assert page.count("figure[data-metric]")  # the page itself still works
