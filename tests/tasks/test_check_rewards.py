"""Probes of scorers: hand-made scorers that pay what they should not, and the command on top of them."""

import json
from pathlib import Path

import pytest

from whetstone import __main__ as cli
from whetstone.config import build, load
from whetstone.tasks.check_rewards import Judge, Scored, check_rewards
from whetstone.tasks.probes import Kind, Probe, change_character, make_probes
from whetstone.terminal.findings import Status
from whetstone.types import Problem, Score

REWARDS = """
import time

def good(completions, answer, **_):
    return [float(text.endswith(f"<answer>{a}</answer>")) for text, a in zip(map(plain, completions), answer)]

def pays_junk(completions, answer, **_):
    junk = ["ipsum dolor sit amet</answer>" in plain(completion) for completion in completions]
    return [max(float(j), pay) for j, pay in zip(junk, good(completions, answer))]

def pays_empty(completions, answer, **_):
    empty = [plain(completion) == "" for completion in completions]
    return [max(float(e), pay) for e, pay in zip(empty, good(completions, answer))]

def raises(completions, answer, **_):
    if any("[[[" in plain(text) for text in completions):
        raise RecursionError("too deep")
    return good(completions, answer)

def hangs(completions, answer, **_):
    if any("9**9" in plain(text) for text in completions):
        time.sleep(60)
    return good(completions, answer)

def plain(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]
"""
SUMS = "datasets={chain_sum: {config: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}}"


def test_the_probes_of_a_number() -> None:
    probes = {probe.name: probe for probe in make_probes("7", ["7", "12", "9"], "What is 105 - 98?")}
    assert probes["gold + 1"].text == "8" and probes["gold - 1"].text == "6"
    assert probes["other gold"].text == "12" and probes["all options"].text == "12 or 7 or 9"
    assert probes["from question"].text == "105"
    assert probes["one character"].text == "8" and "7" in probes["buried"].text
    assert {probes[name].kind for name in ("empty", "junk", "huge", "code")} == {Kind.WORTHLESS}
    assert "gold + 1" not in {probe.name for probe in make_probes("seven", ["eight"])}
    assert {probe.kind for probe in make_probes(None, [])} == {Kind.WORTHLESS}
    changed = [change_character(text) for text in ("9", "0.5", "z", "<A>", "-+")]
    assert changed == ["1", "1.5", "a", "<B>", "x-+"]


def test_functions_that_pay_what_they_should_not_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    functions = ",".join(f"{tmp_path}/mine.py:{name}" for name in ("pays_junk", "pays_empty", "raises"))
    words = ["check", SUMS, "reward_workers=1", f"reward_funcs=[accuracy,{functions}]"]
    assert cli.run([*words, "--rewards", "--problems", "2", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    results = {result["name"]: result for result in document["tasks"]["chain_sum"]}
    wrong = {name: result["status"] for name, result in results.items() if result["status"] != "ok"}
    assert wrong == {"junk": "warning", "no text": "warning", "nested list": "problem"}
    assert document["problems"] == 1
    assert results["gold"]["parts"] == {"accuracy": 1.0, "pays_junk": 1.0, "pays_empty": 1.0, "raises": 1.0}
    assert (results["gold"]["paid"], results["gold"]["number"], results["gold"]["reward"]) == (2, 2, 4.0)
    assert results["junk"]["parts"]["pays_junk"] == 1.0 and "pays_junk pays 1" in results["junk"]["note"]
    assert results["no text"]["parts"]["pays_empty"] == 1.0
    assert results["nested list"]["failures"] == 2 and "RecursionError" in results["nested list"]["note"]


def scored(name: str, kind: Kind, reward: float, correct: float = 0.0) -> Scored:
    problem = Problem(id="gcd/train/0", task="gcd", messages=(), answer="5")
    parts = {"correct": correct, "accuracy": reward}
    score = Score(reward=reward, parts=parts, answer="x")
    return Scored(problem=problem, probe=Probe(name, kind, "x"), text="x", score=score, seconds=0.0)


@pytest.mark.parametrize(
    ("kind", "reward", "correct", "status"),
    [
        (Kind.WORTHLESS, 0.0, 0.0, Status.OK),
        (Kind.WORTHLESS, 0.2, 0.0, Status.WARNING),  # part credit
        (Kind.WORTHLESS, 1.0, 0.0, Status.PROBLEM),  # as much as the gold answer
        (Kind.WORTHLESS, 1.0, 1.0, Status.PROBLEM),
        (Kind.SURROUNDED, 0.9, 0.0, Status.OK),
        (Kind.SURROUNDED, 1.0, 1.0, Status.PROBLEM),
        (Kind.HEDGE, 0.6, 0.0, Status.WARNING),
        (Kind.OTHER, 1.0, 1.0, Status.PROBLEM),
        (Kind.NEAR, 0.9, 0.0, Status.OK),
        (Kind.NEAR, 1.0, 1.0, Status.PROBLEM),
    ],
)
def test_what_looks_wrong(kind: Kind, reward: float, correct: float, status: Status) -> None:
    entries = [scored("gold", Kind.GOLD, 1.0, 1.0), *[scored("probe", kind, reward, correct)] * 4]
    gold, probe = Judge(build({}), 0.0).results(entries)
    assert (gold.status, probe.status, probe.paid) == (Status.OK, status, 4 * correct)
    (unpaid,) = Judge(build({}), 0.0).results([scored("gold", Kind.GOLD, 0.5)])
    assert unpaid.status is Status.PROBLEM
    # A constant that is right on 70 % of the problems may be another problem's gold answer.
    other = [scored("probe", Kind.OTHER, 1.0, 1.0)] * 3 + [scored("probe", Kind.OTHER, 0.0)]
    assert [Judge(build({}), rate).results(other)[0].status for rate in (0.0, 0.7)] == [
        Status.PROBLEM,
        Status.OK,
    ]


def test_a_sound_configuration_has_exit_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", SUMS, "--rewards", "reward_workers=1"]
    assert cli.run([*words, "--problems", "3"]) == 0
    shown = capsys.readouterr().out
    assert "66 answers of 22 kinds" in shown and "problem" not in shown
    assert cli.run([*words, "--problems", "1"]) == 2


@pytest.mark.slow
def test_a_function_that_hangs_costs_its_limit_and_is_found(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    words = [SUMS, f"reward_funcs=[accuracy,{tmp_path}/mine.py:hangs]", "reward_workers=1"]
    (check,) = check_rewards(load(None, [*words, "reward_timeout_s=0.2"]).config, 2)
    assert {result.name for result in check.results if result.status is Status.PROBLEM} == {"power"}
    assert {result.name: result.failures for result in check.results}["power"] == 2


TASK = """
import time
from whetstone.tasks.base import Task
from whetstone.types import TaskScore

class Hangs(Task):
    generated = True

    def problem(self, index):
        return self.make_problem(index, f"{index}?", index)

    def gold(self, problem):
        return f"<answer>{problem.answer}</answer>"

    def score(self, problem, text):
        time.sleep(60)
"""


def test_a_task_that_hangs_on_gold_is_not_probed_further(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    words = [f"datasets={{{tmp_path}/mine.py:Hangs: {{}}}}", "reward_workers=1", "reward_timeout_s=0.2"]
    (check,) = check_rewards(load(None, words).config, 2)
    (result,) = check.results
    assert (result.name, result.failures, result.status) == ("gold", 2, Status.PROBLEM)
    assert "timeout" in result.note
