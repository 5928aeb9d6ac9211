"""The views of `whet watch` in Chromium: the page shows the numbers of a run that applies every rule."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.page import Page, completions_of, rows_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.browser
STEP = 6


def tokens_of(folder: Path, step: int) -> tuple[dict, dict[str, np.ndarray], np.ndarray]:
    with np.load(folder / "completions" / f"tokens_{step}.npz") as file:
        description = json.loads(file["description"].tobytes())
        numbers = dict(zip(description["columns"], file["numbers"].astype(float), strict=True))
        return description, numbers, file["rules"]


def by_problem(rows: list[dict]) -> dict[str, list[dict]]:
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(row["problem"], []).append(row)
    return groups


def test_token_strip_and_numbers_by_pointer_and_keyboard(page: Page, serve: Callable, ruled: Path) -> None:
    description, numbers, rules = tokens_of(ruled, STEP)
    first = description["completions"][0]
    length = first["tokens"]
    page.show(serve(ruled), view="groups", step=str(STEP), problem=first["problem"], coloring="rule")
    wait_until(lambda: page.count(".completion") and page.text("section h2") == first["problem"])
    card = f".completion[aria-label='sample {first['sample']}']"
    assert page.count(f"{card} .tokens span") == length

    # By keyboard: every number of the first and the last token.
    titles = {
        "logprob (sampler)": numbers["sampler_logprob"],
        "entropy": numbers["entropy"],
        "trainer minus sampler logprob": numbers["old_logprob"] - numbers["sampler_logprob"],
        "ratio of new to old policy": np.exp(numbers["logprob"] - numbers["old_logprob"]),
        "KL to the reference": numbers["kl"],
        "value of the critic": numbers["value"],
        "advantage": numbers["advantage"],
        "weight in the loss": numbers["weight"],
    }
    for key, index in (("Home", 0), ("ArrowRight", 1), ("End", length - 1)):
        page.press(f"{card} .strip", key)
        shown = page.facts(f"{card} .numbers")
        assert f"token {index}" in shown
        assert page.attribute(f"{card} .strip", "aria-valuenow") == str(index)
        for title, column in titles.items():
            assert float(shown[title]) == pytest.approx(column[index], rel=2e-3, abs=2e-5), title
        assert f"entropy {shown['entropy']}" in str(page.attribute(f"{card} .strip", "aria-valuetext"))
    # By the pointer: a token of the text.
    page.script(
        "const over = new PointerEvent('pointerover', {bubbles: true});"
        "document.querySelector(arguments[0]).dispatchEvent(over)",
        f"{card} .tokens span:nth-child(3)",
    )
    assert float(page.facts(f"{card} .numbers")["entropy"]) == pytest.approx(
        numbers["entropy"][2], rel=2e-3, abs=2e-5
    )
    # Which rule removed or clipped tokens: counts, marks and the strip.
    names = description["rules"]
    counts = {name: int(((rules[:length] >> bit) & 1).sum()) for bit, name in enumerate(names)}
    shown = {
        name: page.script(
            "return document.querySelector(arguments[0])?.innerText ?? ''", f"{card} [data-rule={name}]"
        )
        for name in names
    }
    assert {
        name: int(line.split(": ")[-1].split()[0]) if line else 0 for name, line in shown.items()
    } == counts
    removed = (numbers["weight"][:length] == 0) | (((rules[:length] >> names.index("clipped")) & 1) > 0)
    assert page.count(f"{card} .tokens .ruled") == int((rules[:length] > 0).sum())
    assert page.count(f"{card} .tokens .removed") == int(removed.sum())
    pixels = page.script(
        "const strip = document.querySelector(arguments[0]), n = arguments[1];"
        "const context = strip.getContext('2d'), x = (i) => (i + 0.25) * strip.width / n;"
        "return [...Array(n).keys()].map((i) => context.getImageData(x(i), 4, 1, 1).data[3])",
        f"{card} .strip",
        length,
    )
    assert [alpha > 0 for alpha in pixels] == [bool(bits) for bits in rules[:length]]
    everything = {name: int(((rules >> bit) & 1).sum()) for bit, name in enumerate(names)}
    assert all(everything[name] for name in names if name != "equal_rewards")
    # Every coloring of the issue can be chosen; the color of a token follows its number.
    for coloring, column in (
        ("entropy", numbers["entropy"]),
        ("kl", numbers["kl"]),
        ("value", numbers["value"]),
    ):
        page.choose("color tokens by", coloring)
        wait_until(lambda coloring=coloring: f"coloring={coloring}" in page.browser.current_url)
        wait_until(lambda: not page.count(".tokens .ruled"))
        alphas = page.script(
            "const alpha = (color) => /\\/ ([\\d.]+)\\)|, ([\\d.]+)\\)$/.exec(color)?.slice(1).find(Boolean);"
            "return [...document.querySelectorAll(arguments[0])].map("
            "(span) => Number(alpha(span.style.background) ?? 0))",
            f"{card} .tokens span",
        )
        low, high = {"entropy": (0, 2), "kl": (0, 0.5), "value": (-1, 1)}[coloring]
        share = np.clip((column[:length] - low) / (high - low), 0, 1)
        expected = 1.5 * np.abs(share - 0.5) if coloring == "value" else 0.75 * share
        assert alphas == pytest.approx(expected, abs=0.011)
    assert "not part of this run" not in "".join(page.texts("select[aria-label='color tokens by'] option"))
    page.click(f"{card} details.values summary")
    wait_until(lambda: page.count(f"{card} .values tbody tr") == length)
    assert page.is_quiet()


def cells(page: Page, selector: str) -> list[list[str]]:
    script = (
        "return [...document.querySelectorAll(arguments[0])].map("
        "(row) => [...row.cells].map((cell) => cell.innerText))"
    )
    return page.script(script, selector)


def shown_groups(page: Page) -> set[str]:
    script = "return [...document.querySelectorAll('.list button')].map((b) => b.dataset.problem)"
    return set(page.script(script))


KINDS: dict[str, Callable[[list[dict]], bool]] = {
    "all": lambda rows: True,
    "all right": lambda rows: all(row["parts"]["correct"] for row in rows),
    "all wrong": lambda rows: not any(row["parts"]["correct"] for row in rows),
    "mixed": lambda rows: 0 < sum(row["parts"]["correct"] for row in rows) < len(rows),
    "truncated": lambda rows: any(row["finish"] == "length" for row in rows),
    "failed": lambda rows: any(row["failure"] for row in rows),
}


def test_groups_by_every_filter_task_text_and_reward(
    page: Page, serve: Callable, tmp_path: Path, ruled: Path
) -> None:
    """The completions of a real step, with one failure and one group of right answers put in."""
    folder = tmp_path / "run"
    (folder / "completions").mkdir(parents=True)
    for name in ("metrics.jsonl", "config.yaml"):
        (folder / name).write_bytes((ruled / name).read_bytes())
    groups = by_problem(completions_of(ruled, STEP))
    names = list(groups)
    groups[names[0]][1]["failure"] = "timeout"
    for row in groups[names[1]]:
        row |= {"reward": 1.0, "parts": {"correct": 1.0, "accuracy": 1.0}}
    groups[names[2]][0] |= {
        "reward": 1.0,
        "parts": {"correct": 1.0, "accuracy": 1.0},
        "completion": "Zebra <b>",
    }
    rows = [row for own in groups.values() for row in own]
    (folder / "completions" / f"step_{STEP}.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    page.show(serve(folder), view="groups", step=str(STEP))
    wait_until(lambda: page.count(".list button"))
    for kind, rule in KINDS.items():
        page.choose("filter", kind)
        expected = {name for name, own in groups.items() if rule(own)}
        wait_until(lambda expected=expected: shown_groups(page) == expected)
        assert page.text("#matches").startswith(f"{len(expected)} of {len(groups)} ")
    page.choose("filter", "all")
    task = rows[0]["task"]
    page.choose("task", task)
    problems = {row["problem"] for row in rows if row["task"] == task}
    wait_until(lambda: page.count(".list button") == len(problems))
    page.choose("task", "")
    page.choose("text of prompt or completion", "zebra <B>")
    wait_until(lambda: page.count(".list button") == 1)
    assert page.text("section h2") == names[2]
    page.choose("text of prompt or completion", "")
    # The histogram: counts by bin, and a click shows the groups with a reward in it.
    wait_until(lambda: page.count(".list button") == len(groups))
    rewards = [row["reward"] for row in rows]
    low, high = min(0, *rewards), max(1, *rewards)
    bins = [0] * 10
    for reward in rewards:
        bins[min(9, math.floor((reward - low) / (high - low) * 10 + 1e-9))] += 1
    shown = page.script(
        "return [...document.querySelectorAll('.bars button')].map((b) => Number(b.dataset.count))"
    )
    assert shown == bins and bins[9]
    page.click(".bars button:nth-child(10)")
    right = {row["problem"] for row in rows if row["reward"] >= low + 0.9 * (high - low)}
    wait_until(lambda: page.count(".list button") == len(right))
    assert 0 < len(right) < len(groups)
    # A card has what was paid and why.
    page.click(f".list button[data-problem='{names[2]}']")
    wait_until(lambda: page.text("section h2") == names[2])
    card = page.facts(".completion[aria-label='sample 0'] .facts")
    row, mean = groups[names[2]][0], np.mean([row["reward"] for row in groups[names[2]]])
    assert float(card["reward"]) == row["reward"] and float(card["correct"]) == 1.0
    assert float(card["to the mean"]) == pytest.approx(row["reward"] - mean, rel=1e-3)
    assert card["tokens"] == str(row["length"]) and card["right answer"] == row["gold"]
    assert page.is_quiet()


def test_the_same_problem_over_steps_and_evaluations(page: Page, serve: Callable, ruled: Path) -> None:
    steps = [2, 4, 6]
    seen: dict[str, list[tuple[int, float]]] = {}
    for step in steps:
        for problem, own in by_problem(completions_of(ruled, step)).items():
            seen.setdefault(problem, []).append((step, float(np.mean([row["reward"] for row in own]))))
    again = next(problem for problem, entries in seen.items() if len(entries) > 1)
    address = serve(ruled)
    page.show(address, view="groups", step=str(seen[again][-1][0]), problem=again)
    wait_until(lambda: page.count("#history tbody tr") == len(seen[again]))
    shown = cells(page, "#history tbody tr")
    assert [line[0] for line in shown] == [f"step {step}" for step, _ in seen[again]]
    assert [float(line[3]) for line in shown] == pytest.approx(
        [reward for _, reward in seen[again]], rel=1e-3
    )
    page.click("#history tbody button")
    wait_until(lambda: f"step={seen[again][0][0]}" in page.browser.current_url)
    assert wait_until(lambda: page.text("section h2")) == again

    documents = {
        step: json.loads((ruled / "eval_results" / f"eval_step_{step}.json").read_text())
        for step in (0, 2, 4, 6)
    }
    problem = documents[0]["completions"][0]["problem"]
    page.show(address, view="evaluation", problem=problem)
    wait_until(lambda: page.count("#problem tbody tr") == 4)
    shown = cells(page, "#problem tbody tr")
    for line, document in zip(shown, documents.values(), strict=True):
        own = [row for row in document["completions"] if row["problem"] == problem]
        assert float(line[3]) == pytest.approx(np.mean([row["reward"] for row in own]), rel=1e-3)
        assert line[4] == f"{sum(row['correct'] for row in own)} of {len(own)}"
    assert page.count(".pairs tbody tr") == len({row["problem"] for row in documents[0]["completions"]})
    assert page.is_quiet()


def test_curves_by_step_and_minute_smoothed_and_zoomed(page: Page, serve: Callable, ruled: Path) -> None:
    rows, evals = rows_of(ruled), rows_of(ruled, "eval")
    page.show(serve(ruled), view="curves")
    wait_until(lambda: page.count("figure[data-metric='reward'] path"))

    def read(metric: str, keys: int) -> list[str]:
        script = (
            "const svg = document.querySelector(`figure[data-metric='${arguments[0]}'] svg`); svg.focus();"
            "const seen = []; for (let n = 0; n < arguments[1]; n++) {"
            "  svg.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight'}));"
            "  seen.push(svg.parentElement.querySelector('.readout').innerText); } return seen"
        )
        return page.script(script, metric, keys)

    lines = read("grad_norm", len(rows))
    assert [line.split(":")[0] for line in lines] == [f"step {row['step']}" for row in rows]
    assert [float(line.split(": ")[1]) for line in lines] == pytest.approx(
        [row["grad_norm"] for row in rows], rel=1e-3
    )
    # Evaluation with its interval and the line of step 0.
    line = read("evaluation accuracy", 1)[0]
    share = [evals[0][key] for key in ("accuracy", "accuracy_low", "accuracy_high")]
    assert f"fixed problems {100 * share[0]:.1f} % [{100 * share[1]:.1f} %, {100 * share[2]:.1f} %]" in line
    start = page.attribute("figure[data-metric='evaluation accuracy'] .start", "data-start")
    assert float(str(start)) == pytest.approx(evals[0]["accuracy"])
    # By minute: the sum of the times up to a step.
    page.click_button("by minute")
    wait_until(lambda: "over minute" in str(page.attribute("figure[data-metric='reward'] svg", "aria-label")))
    minutes = np.cumsum([row["step_time"] / 60 for row in rows])
    lines = read("grad_norm", len(rows))
    assert [float(line.split(":")[0].removeprefix("minute ")) for line in lines] == pytest.approx(
        list(minutes), rel=1e-2
    )
    page.click_button("by step")
    wait_until(lambda: "over step" in str(page.attribute("figure[data-metric='reward'] svg", "aria-label")))
    # Smoothing keeps the points as a pale line.
    assert page.count("path.raw") == 0
    page.script(
        "const slider = document.querySelector('input[type=range]');"
        "slider.value = 0.9; slider.dispatchEvent(new Event('input'))"
    )
    wait_until(lambda: page.count("figure[data-metric='grad_norm'] path.raw") == 1)
    # Zoom by dragging over the right half; the ticks are of that half.
    page.script(
        "const svg = document.querySelector(`figure[data-metric='grad_norm'] svg`);"
        "const box = svg.getBoundingClientRect();"
        "const at = (share) => ({clientX: box.left + share * box.width, clientY: box.top + 50});"
        "svg.dispatchEvent(new PointerEvent('pointerdown', at(0.55)));"
        "svg.dispatchEvent(new PointerEvent('pointermove', at(0.9)));"
        "svg.dispatchEvent(new PointerEvent('pointerup', at(0.99)));"
    )
    wait_until(lambda: page.count("#whole"))
    assert [line.split(":")[0] for line in read("grad_norm", 1)] == ["step 6"]
    page.press("figure[data-metric='grad_norm'] svg", "Escape")
    wait_until(lambda: not page.count("#whole"))
    # The table beside a chart, and tasks with their intervals.
    page.click("figure[data-metric='grad_norm'] details summary")
    wait_until(lambda: page.count("figure[data-metric='grad_norm'] tbody tr") == len(rows))
    column = page.texts("figure[data-metric='grad_norm'] tbody td")
    assert [float(cell) for cell in column] == pytest.approx([row["grad_norm"] for row in rows], rel=1e-3)
    document = json.loads((ruled / "eval_results" / "eval_step_6.json").read_text())
    tasks = document["summary"]["per_task"]
    wait_until(lambda: page.count("#tasks tbody tr") == len(tasks))
    first = page.texts("#tasks tbody tr:first-child > *")
    name, task = next(iter(tasks.items()))
    assert first[0] == name and first[3] == f"{100 * task['accuracy']['mean']:.1f} %"
    assert page.is_quiet()


def test_the_arithmetic_of_charts(page: Page, serve: Callable, ruled: Path) -> None:
    """Smoothing, thinning and numbers as text, in the page's own modules."""
    page.show(serve(ruled), view="now")

    def call(module: str, expression: str) -> Any:
        script = f"const done = arguments[0]; import('/{module}.js').then((m) => done({expression}))"
        return page.browser.execute_async_script(script)

    assert call("chart", "m.smooth([[1, 0], [2, 1], [3, 1]], 0.5)") == [[1, 0], [2, 0.5], [3, 0.75]]
    assert call("chart", "m.smooth([[1, 4], [2, 8]], 0)") == [[1, 4], [2, 8]]
    thinned = call("chart", "m.thin([...Array(5000).keys()].map((x) => [x, x === 2500 ? 9 : 0]), 100)")
    assert len(thinned) == 200 and [2500, 9] in thinned  # no peak is lost
    numbers = call("dom", "[0, 0.12345, 1234.5, 1e-5, NaN, 2.5e8].map(m.format)")
    assert numbers == ["0", "0.1235", "1,235", "1.00e-5", "", "2.50e+8"]
    assert call("dom", "m.visible('a\\u202eb\\n\\u0000')") == "a\u27e8202e\u27e9b\n\u27e800\u27e9"
    assert call(
        "tokens",
        "m.rulesOf(0b010011, ['clipped', 'importance_bound', 'off_policy', 'low_entropy', "
        "'truncated_completion'])",
    ) == ["truncated_completion", "clipped", "importance_bound"]
