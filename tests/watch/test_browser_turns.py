"""Episodes of several turns in Chromium: a real run of a game, and hostile text of environments."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.page import HOSTILE, Page, completions_of
from tests.support.waiting import wait_until
from whetstone.report import write_report

pytestmark = pytest.mark.browser
STEP = 4


def blocks(page: Page, card: str, kind: str) -> list[str]:
    return page.texts(f"{card} .turn.{kind}")


def test_a_game_as_a_conversation_with_its_tokens(page: Page, serve: Callable, game: Path) -> None:
    with np.load(game / "completions" / f"tokens_{STEP}.npz") as file:
        description = json.loads(file["description"].tobytes())
        sampled, observed = file["token_ids"], file["observation_ids"]
        logprobs = file["numbers"][description["columns"].index("sampler_logprob")]
    starts = np.cumsum([0] + [row["tokens"] for row in description["completions"]])
    # The first completion of two turns, and where its tokens are.
    number, row = next(
        (n, row) for n, row in enumerate(description["completions"]) if len(row["turn_tokens"]) == 2
    )
    before = sum(
        seen for earlier in description["completions"][:number] for _, seen in earlier["turn_tokens"]
    )
    (first, seen), (second, last) = row["turn_tokens"]
    assert last == 0 and first + second == row["tokens"] == row["length"]
    page.show(serve(game), view="groups", step=str(STEP), problem=row["problem"])
    wait_until(lambda: page.text("section h2") == row["problem"])
    card = f".completion[aria-label='sample {row['sample']}']"
    # Both turns with their rewards, what was observed with its time, and the last word, which nobody saw.
    said, answers = blocks(page, card, "said"), blocks(page, card, "observed")
    assert len(said) == 2 and len(answers) == 2
    for n, message in enumerate(row["turns"][::2]):
        assert f"policy, turn {n + 1}" in said[n] and message["content"] in said[n]
        assert f"reward {row['turn_rewards'][n]:g}" in said[n]
    for n, message in enumerate(row["turns"][1::2]):
        assert f"environment, turn {n + 1}" in answers[n] and message["content"] in answers[n]
        seconds = float(answers[n].split(f"turn {n + 1} ")[1].split(" s")[0])
        assert seconds == pytest.approx(row["turn_seconds"][n], rel=1e-2)
    assert "not trained on" in answers[0] and "did not see" in answers[1]
    # Tokens: all of them in order, those of the observation without numbers.
    texts = description["texts"]
    ids = [
        *sampled[starts[number] :][:first],
        *observed[before:][:seen],
        *sampled[starts[number] + first :][:second],
    ]
    assert page.texts(f"{card} [data-token]") == [texts[str(token)] for token in ids]
    assert page.count(f"{card} .observed [data-token]") == seen
    assert f"{seen} tokens observed, not trained on" in page.text(f"{card} .token-view")
    page.press(f"{card} .strip", "Home")
    facts = page.facts(f"{card} .numbers")
    assert float(facts["logprob (sampler)"]) == pytest.approx(logprobs[starts[number]], rel=2e-3, abs=1e-6)
    page.press(f"{card} .strip", *["ArrowRight"] * first)
    facts = page.facts(f"{card} .numbers")
    assert facts["observed"] == "not trained on" and "logprob (sampler)" not in facts
    page.press(f"{card} .strip", *["ArrowRight"] * seen)
    facts = page.facts(f"{card} .numbers")
    assert float(facts["logprob (sampler)"]) == pytest.approx(
        logprobs[starts[number] + first], rel=2e-3, abs=1e-6
    )
    page.click(f"{card} details.values summary")
    wait_until(lambda: page.count(f"{card} .values tbody tr") == first + seen + second)
    assert page.texts(f"{card} .values td:last-child").count("observed, not trained on") == seen
    facts = page.facts(f"{card} .facts")
    assert facts["turns"] == "2" and facts["tokens"] == str(row["length"])
    assert page.is_quiet()


def test_game_without_tokens_in_list_report_and_evaluation(page: Page, serve: Callable, game: Path) -> None:
    with_tokens = json.loads(np.load(game / "completions" / f"tokens_{STEP}.npz")["description"].tobytes())
    names = {row["problem"] for row in with_tokens["completions"]}
    row = next(row for row in completions_of(game, STEP) if row["problem"] not in names)
    address = serve(game)
    page.show(address, view="groups", step=str(STEP), problem=row["problem"])
    wait_until(lambda: page.text("section h2") == row["problem"])
    said = page.texts(".completion[aria-label='sample 0'] .said pre")
    assert [text.strip() for text in said] == [message["content"].strip() for message in row["turns"][::2]]
    # A search finds what the environment said.
    word = row["turns"][1]["content"]
    page.choose("text of prompt or completion", word)
    rows = completions_of(game, STEP)
    matching = {r["problem"] for r in rows if any(word in message["content"] for message in r["turns"])}
    wait_until(lambda: page.count(".list button") == len(matching))
    document = json.loads((game / "eval_results" / f"eval_step_{STEP}.json").read_text())
    page.show(address, view="evaluation")
    wait_until(lambda: page.count(".pairs tbody tr") == len(document["completions"]))
    turns = document["completions"][0]["turns"]
    shown = page.texts(".pairs tbody tr:first-child td:last-child .turn pre")
    assert [text.strip() for text in shown] == [message["content"].strip() for message in turns]
    assert page.is_quiet()
    page.show_report(write_report(game))
    wait_until(lambda: page.count(".completion .turn"))
    assert page.count(".completion .observed [data-token]") and page.count("#try") == 0
    assert page.is_quiet()


@pytest.mark.parametrize("is_report", [False, True])
def test_hostile_observations_and_tool_output_are_text(
    page: Page, serve: Callable, game: Path, tmp_path: Path, is_report: bool
) -> None:
    folder = tmp_path / "bad"
    (folder / "completions").mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl"):
        (folder / name).write_bytes((game / name).read_bytes())
    row = completions_of(game, STEP)[0]
    call = {"name": HOSTILE, "arguments": {HOSTILE: HOSTILE}}
    row |= {"sample": 0, "environment_error": HOSTILE, "tool_calls": 2, "tool_errors": 1}
    row["turns"] = [
        {"role": "assistant", "content": HOSTILE, "tool_calls": [call, {"error": HOSTILE}]},
        {"role": "tool", "name": HOSTILE, "content": HOSTILE},
        {"role": "user", "content": HOSTILE},
        {"role": "assistant", "content": HOSTILE},
        {"role": "tool", "name": HOSTILE, "content": "\u0627\u0644" * 20 + HOSTILE},
    ]
    lines = "".join(json.dumps({**row, "sample": n}) + "\n" for n in range(2))
    (folder / "completions" / f"step_{STEP}.jsonl").write_text(lines)
    description = {
        "step": STEP,
        "columns": ["sampler_logprob"],
        "rules": ["clipped"],
        "completions": [{**row, "tokens": 2, "turn_tokens": [[1, 2], [1, 0]]}],
        "texts": {"0": HOSTILE, "1": "<b>", "2": "\u202e"},
    }
    np.savez(
        folder / "completions" / f"tokens_{STEP}.npz",
        token_ids=np.array([0, 1], dtype=np.int32),
        observation_ids=np.array([0, 2], dtype=np.int32),
        numbers=np.zeros((1, 2), dtype=np.float32),
        rules=np.zeros(2, dtype=np.uint8),
        description=np.frombuffer(json.dumps(description).encode(), dtype=np.uint8),
    )
    if is_report:
        page.show_report(write_report(folder))
    else:
        page.show(serve(tmp_path), runs="bad", view="groups", step=str(STEP))
    wait_until(lambda: page.count(".completion") == 2)
    for card in (".completion[aria-label='sample 0']", ".completion[aria-label='sample 1']"):
        # Two turns, their two calls, one block for what followed each.
        assert page.count(f"{card} .turn.said") == 2 and page.count(f"{card} .turn.observed") == 2
        assert all("window.hit=1" in text for text in blocks(page, card, "observed"))
        assert [text.count("window.hit=1") > 1 for text in page.texts(f"{card} .call")] == [True, True]
    assert page.count(".completion[aria-label='sample 0'] [data-token]") == 4
    page.check_harmless()
    assert page.is_quiet()
