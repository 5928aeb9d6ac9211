"""Which problems the report shows: some that went from wrong to right, and honestly some that did not.

Chosen by position, never by taste: the same run always shows the same ones.
"""

from dataclasses import dataclass
from typing import Any

from whetstone.report.read import Evaluation, Run

# (right before, right after, how many, what it is called)
_KINDS = (
    (False, True, 3, "wrong, then right"),
    (False, False, 1, "wrong, and still wrong"),
    (True, False, 1, "right, then wrong"),
    (True, True, 0, "right, and still right"),
)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One problem with its answer at each end of the run (one answer, where there is one evaluation)."""

    kind: str
    sides: tuple[tuple[int, dict[str, Any]], ...]  # (step, completion)


def pairs(run: Run) -> list[Pair]:
    """The examples to show."""
    if run.first is None:
        return []
    before = _first_samples(run.first)
    if run.last is None:
        return [
            Pair(kind="so far", sides=((run.first.step, answered),))
            for answered in _spread(list(before.values()), 3)
        ]
    after = _first_samples(run.last)
    both = [problem for problem in before if problem in after]
    if not run.last.summary.get("is_judged", True):  # nothing is right or wrong: rows without answers
        return [
            Pair(kind="before and after", sides=((run.first.step, before[p]), (run.last.step, after[p])))
            for p in both[:3]
        ]
    found = []
    for was, became, number, kind in _KINDS:
        alike = [p for p in both if (before[p]["correct"], after[p]["correct"]) == (was, became)]
        if was and became and not found:  # nothing changed and nothing is wrong: show what right looks like
            number = 3
        # Tasks take turns, so that one large task does not fill the page.
        found += [
            Pair(kind=kind, sides=((run.first.step, before[p]), (run.last.step, after[p])))
            for p in _take_turns(alike, before, number)
        ]
    return found


def _first_samples(evaluation: Evaluation) -> dict[str, dict[str, Any]]:
    return {answered["problem"]: answered for answered in evaluation.completions if answered["sample"] == 0}


def _take_turns(problems: list[str], answers: dict[str, dict[str, Any]], number: int) -> list[str]:
    by_task: dict[str, list[str]] = {}
    for problem in problems:
        by_task.setdefault(answers[problem]["task"], []).append(problem)
    taken: list[str] = []
    while len(taken) < number and any(by_task.values()):
        taken += [queue.pop(0) for queue in by_task.values() if queue]
    return taken[:number]


def _spread(answers: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    number = min(number, len(answers))
    return [answers[i * len(answers) // number] for i in range(number)]
