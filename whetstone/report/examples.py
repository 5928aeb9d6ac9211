"""Which problems the report shows: chosen by position, so that the same run always shows the same ones."""

import itertools
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
    start, before = run.first.step, _first_samples(run.first)
    if run.last is None:
        return [Pair(kind="so far", sides=((start, a),)) for a in _spread(list(before.values()), 3)]
    end, after = run.last.step, _first_samples(run.last)
    both = [problem for problem in before if problem in after]
    chosen: list[tuple[str, str]] = []  # kind, problem
    if not run.last.is_judged:
        chosen = [("before and after", problem) for problem in both[:3]]
    for was, became, number, kind in _KINDS if run.last.is_judged else ():
        alike = [p for p in both if (before[p]["correct"], after[p]["correct"]) == (was, became)]
        if was and became and not chosen:  # nothing changed and nothing is wrong: show what right looks like
            number = 3
        chosen += [(kind, problem) for problem in _take_turns(alike, before, number)]
    return [Pair(kind=kind, sides=((start, before[p]), (end, after[p]))) for kind, p in chosen]


def _first_samples(evaluation: Evaluation) -> dict[str, dict[str, Any]]:
    return {answered["problem"]: answered for answered in evaluation.completions if answered["sample"] == 0}


def _take_turns(problems: list[str], answers: dict[str, dict[str, Any]], number: int) -> list[str]:
    """Tasks take turns, so that one large task does not fill the page."""
    by_task: dict[str, list[str]] = {}
    for problem in problems:
        by_task.setdefault(answers[problem]["task"], []).append(problem)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*by_task.values()))
    return [problem for problem in turns if problem is not None][:number]


def _spread(answers: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    number = min(number, len(answers))
    return [answers[i * len(answers) // number] for i in range(number)]
