"""Talk in Chromium, with checkpoints of a real run: answers, stops, errors, and a run that trains beside."""

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.page import HOSTILE, Page, completions_of
from tests.support.waiting import wait_until
from whetstone.inference.sampler import Sampler

pytestmark = pytest.mark.browser
STEP = 4
LOAD_S = 180  # for a process that imports torch on a busy machine


def field(page: Page, label: str) -> str:
    return page.script("return document.querySelector(`[aria-label='${arguments[0]}']`).value", label)


def wait_for_answers(page: Page, count: int) -> None:
    """All of them are there, with the numbers of their tokens."""
    wait_until(lambda: page.count(".talk .strip") == count and page.script("return !send.disabled"), LOAD_S)


def said(page: Page, number: int) -> str:
    return "".join(page.texts(f".talk > .turn:nth-child({number}) [data-token]"))


def test_try_a_problem_and_talk_on(page: Page, serve: Callable, game: Path) -> None:
    row = completions_of(game, STEP)[0]
    page.show(serve(game), view="groups", step=str(STEP), problem=row["problem"])
    wait_until(lambda: page.text("section h2") == row["problem"])
    page.click("#try")
    wait_until(lambda: page.count("#send") and field(page, "checkpoint") == "final_model")
    assert (
        field(page, "message") == row["messages"][-1]["content"] and "view=talk" in page.browser.current_url
    )
    options = page.texts("select[aria-label=checkpoint] option")
    assert options == ["final_model (step 4)", "checkpoint-4 (step 4)", "checkpoint-2 (step 2)"]
    page.click("#send")
    assert page.script("return send.disabled") and not page.script("return stop.disabled")
    wait_for_answers(page, 1)
    # The answer and its numbers are those of the sampler, with the same seed.
    sampler = Sampler.open(game)
    [expected] = sampler.sample(row["messages"], seed=0)
    details = sampler.inspect(expected)
    assert said(page, 2) == "".join(token.text for token in details)
    card = ".talk > .turn:nth-child(2)"
    page.press(f"{card} .strip", "Home", "ArrowRight")
    facts = page.facts(f"{card} .numbers")
    assert float(facts["logprob at temperature 1"]) == pytest.approx(details[1].logprob, abs=1e-3)
    assert float(facts["entropy"]) == pytest.approx(details[1].entropy, abs=1e-3)
    assert facts["likeliest"].startswith(json.dumps(details[1].likeliest[0][0]))
    page.choose("color tokens by", "entropy")
    alphas = page.script(
        "return [...document.querySelectorAll(`${arguments[0]} [data-token]`)].map((span) => "
        "Number(/([\\d.]+)\\)$/.exec(span.style.background)?.[1] ?? 0))",
        card,
    )
    assert alphas == pytest.approx([0.75 * min(1, token.entropy / 2) for token in details], abs=0.011)
    # The person answers in place of the environment; what is not sent as markup is not shown as markup.
    observation = f"Higher. {HOSTILE}"
    page.choose("message", observation)
    page.click("#send")
    wait_for_answers(page, 2)
    page.check_harmless()
    messages = [*row["messages"], {"role": "assistant", "content": expected.text}]
    [expected] = sampler.sample([*messages, {"role": "user", "content": observation}], seed=1)
    details = sampler.inspect(expected)
    assert said(page, 4) == "".join(token.text for token in details)
    # Another answer takes the place of the last.
    page.click("#again")
    wait_until(lambda: page.count(".talk .strip") == 1)
    wait_for_answers(page, 2)
    # Another checkpoint, greedily.
    page.click_button("new conversation")
    wait_until(lambda: not page.count(".talk > .turn"))
    page.choose("checkpoint", "checkpoint-2")
    page.choose("temperature", "0")
    page.choose("message", row["messages"][-1]["content"])
    page.click("#send")
    wait_for_answers(page, 1)
    earlier = Sampler.open(game / "checkpoint-2")
    [expected] = earlier.sample(row["messages"], temperature=0)
    assert said(page, 2) == "".join(token.text for token in earlier.inspect(expected))
    # The conversation stays while another view is shown, and a reload begins a new one.
    page.click("nav button")
    wait_until(lambda: page.count(".tile"))
    page.click_button("Talk")
    wait_until(lambda: page.count(".talk .strip") == 1)
    assert page.is_quiet()


def test_an_answer_is_stopped_and_errors_are_shown(page: Page, serve: Callable, game: Path) -> None:
    page.show(serve(game), view="talk")
    wait_until(lambda: page.count("#send") and field(page, "checkpoint") == "final_model")
    page.choose("temperature", "5")  # junk without an end
    page.choose("tokens at most", "4000")
    page.choose("message", "Hello")
    page.press("[aria-label=message]", "Enter")  # a line break, not yet sent
    assert not page.count(".talk > .turn")
    page.script(
        "document.querySelector('[aria-label=message]').dispatchEvent("
        "new KeyboardEvent('keydown', {key: 'Enter', ctrlKey: true}))"
    )
    wait_until(lambda: page.count(".talk > .turn:nth-child(2) .tokens span") > 3, LOAD_S)
    page.click("#stop")
    wait_for_answers(page, 1)
    assert page.text("#talk-state") == "stopped"
    assert 3 < page.count(".talk [data-token]") < 4000
    page.choose("temperature", "-1")
    page.choose("message", "Hello")
    page.click("#send")
    wait_until(lambda: "temperature must be a number" in page.text("#talk-state"))
    assert page.is_quiet()


def test_a_run_without_checkpoint_and_one_that_trains_here(
    page: Page, serve: Callable, game: Path, tmp_path: Path
) -> None:
    """Which key gives a checkpoint; while a run trains, only beside it and only when asked."""
    young = tmp_path / "young"
    young.mkdir()
    (young / "config.yaml").write_text('{model_name_or_path: pebble, save_strategy: "no"}')
    (tmp_path / "guess").symlink_to(game)
    address = serve(tmp_path)
    page.show(address, runs="young", view="talk")
    wait_until(lambda: "save_strategy: steps and save_steps" in page.text("#talk-state"))
    assert page.script("return send.disabled && document.getElementById('beside').closest('label').hidden")
    status = {"state": "running", "time": time.time() + 15, "host": socket.gethostname(), "stages": []}
    (young / "status.json").write_text(json.dumps(status))
    page.show(address, runs="guess", view="talk")
    wait_until(lambda: "The run young trains on this machine" in page.text("#talk-state"))
    page.choose("message", "Hello")
    page.click("#send")
    wait_until(lambda: "wait until it has ended" in page.text("#talk-state"))
    assert not page.count(".talk > .turn") and field(page, "message") == "Hello"  # nothing is lost
    page.click("#beside")
    (young / "status.json").write_text(json.dumps(status | {"time": time.time() + 15}))
    page.choose("tokens at most", "4")
    page.click("#send")
    wait_for_answers(page, 1)
    assert page.is_quiet()
