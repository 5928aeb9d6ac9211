"""`whet check CONFIG --rewards`: what the scorers of a configuration pay for probes (`probes.py`).

Scored by the same processes as in training: nothing is evaluated here. A probe that earns what it should not
is a finding; whether a near miss is right after all (several right answers) is for a reader to judge.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from whetstone.config import Config
from whetstone.config.plugins import is_plugin
from whetstone.rewards.builtin import part_names
from whetstone.tasks.base import Task
from whetstone.tasks.constants import constant_rates
from whetstone.tasks.probes import Kind, Probe, make_probes
from whetstone.tasks.registry import make_tasks, task_specs
from whetstone.tasks.scoring.pool import Scorer
from whetstone.tasks.scoring.process import ScoringRequest
from whetstone.terminal.findings import Finding, Status
from whetstone.terminal.stages import stage
from whetstone.terminal.text import cut
from whetstone.types import Problem, Score

MOST_FOR_JUNK = 0.15  # mean part credit of a worthless answer
MOST_FOR_HEDGE = 0.5  # mean part credit of the gold answer among others
MOST_FOR_OTHER = 0.3  # mean part credit of another problem's gold answer
COINCIDENCES = 0.2  # share of other problems' gold answers that may be right, beside the best constant's
MOST_OF_GOLD = 0.5  # share of the gold answer's whole reward that a worthless answer may earn
SLOW = 0.5  # share of the time limit


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A probe of one problem and its score."""

    problem: Problem
    probe: Probe
    text: str  # the whole completion
    score: Score
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """One probe on all problems of a task."""

    name: str
    kind: Kind
    number: int
    paid: int  # how often it was correct, i.e. paid in full
    accuracy: float | None  # mean of what the task pays
    parts: dict[str, float]  # mean of each reward function
    reward: float  # mean of the whole reward
    failures: int
    slowest_s: float
    status: Status
    note: str  # why it looks wrong, with an example


@dataclass(frozen=True, kw_only=True)
class TaskCheck:
    task: str
    results: tuple[ProbeResult, ...]

    @property
    def findings(self) -> list[Finding]:
        """The probes that look wrong; one ok where none does."""
        wrong = [result for result in self.results if result.status is not Status.OK]
        if not wrong:
            number = sum(result.number for result in self.results)
            text = f"{number} answers of {len(self.results)} kinds are paid as they should be"
            return [Finding(name=self.task, status=Status.OK, text=text)]
        return [
            Finding(name=self.task, status=result.status, text=f"{result.name}: {result.note}")
            for result in wrong
        ]


def check_rewards(config: Config, num_problems: int) -> list[TaskCheck]:
    """Probe every task of a configuration on its first `num_problems` training problems."""
    split = "train" if config.tasks.datasets else "eval"
    tasks = make_tasks(config, split)
    constants = constant_rates(task_specs(config, split))
    checks = []
    with Scorer(config) as scorer, scorer.probing():
        for name, task in tasks.items():
            with stage(f"probing {name}"):
                scored = score_probes(task, scorer, num_problems)
            judge = Judge(config, constants.get(name, 0.0))
            checks.append(TaskCheck(task=name, results=tuple(judge.results(scored))))
    return checks


def score_probes(task: Task, scorer: Scorer, num_problems: int) -> list[Scored]:
    """The gold answers first: their scores show where the answer stands in a completion."""
    problems = [task.problem(index) for index in range(min(num_problems, len(task)))]
    golds = [(problem, gold) for problem in problems if (gold := task.gold(problem)) is not None]
    probes = [(problem, Probe("gold", Kind.GOLD, gold, is_whole=True), gold) for problem, gold in golds]
    scored = score(scorer, probes)
    if scored and all(entry.score.failure is not None for entry in scored):
        return scored  # a scorer that can't score a right answer would fail on all others too
    answers = {entry.problem.id: entry.score.answer for entry in scored if entry.score.answer is not None}
    forms = {problem.id: gold for problem, gold in golds}
    rest = []
    for problem in problems:
        answer, form = answers.get(problem.id), forms.get(problem.id, "")
        before, middle, after = form.rpartition(answer) if answer else ("", "", "")
        others = [other for name, other in answers.items() if name != problem.id]
        for probe in make_probes(answer if middle else None, others, problem.question):
            text = probe.text if probe.is_whole or not middle else f"{before}{probe.text}{after}"
            rest.append((problem, probe, text))
    return scored + score(scorer, rest)


def score(scorer: Scorer, probes: Sequence[tuple[Problem, Probe, str]]) -> list[Scored]:
    for problem, _, text in probes:
        ids = (0,) * max(1, len(text) // 4)  # about as many tokens as the text would have
        scorer.submit(ScoringRequest(problem=problem, text=text, completion_ids=ids, truncated=False))
    scores = scorer.gather()
    return [
        Scored(problem=problem, probe=probe, text=text, score=score, seconds=seconds)
        for (problem, probe, text), score, seconds in zip(probes, scores, scorer.seconds, strict=True)
    ]


class Judge:
    """Decides which payments look wrong."""

    def __init__(self, config: Config, constant_rate: float) -> None:
        self._limit_s = config.tasks.reward_timeout_s
        self._constant_rate = constant_rate  # of problems on which the best constant answer is right
        names = zip(config.tasks.reward_funcs, part_names(config.tasks.reward_funcs), strict=True)
        self._own = [name for spec, name in names if is_plugin(spec)]

    def results(self, scored: Iterable[Scored]) -> list[ProbeResult]:
        by_name: dict[str, list[Scored]] = {}
        for entry in scored:
            by_name.setdefault(entry.probe.name, []).append(entry)
        gold = by_name.get("gold", [])
        return [self._result(entries, gold) for entries in by_name.values()]

    def _result(self, entries: list[Scored], gold: list[Scored]) -> ProbeResult:
        first, scores = entries[0], [entry.score for entry in entries]
        status, note = self._verdict(entries, gold)
        accuracies = _values(scores, "accuracy")
        return ProbeResult(
            name=first.probe.name,
            kind=first.probe.kind,
            number=len(entries),
            paid=sum(map(_is_paid, entries)),
            accuracy=fmean(accuracies) if accuracies else None,
            parts=_means(scores),
            reward=fmean(score.reward for score in scores),
            failures=sum(score.failure is not None for score in scores),
            slowest_s=max(entry.seconds for entry in entries),
            status=status,
            note=note,
        )

    def _verdict(self, entries: list[Scored], gold: list[Scored]) -> tuple[Status, str]:
        kind = entries[0].probe.kind
        failed = [entry for entry in entries if entry.score.failure is not None]
        if failed:
            reason = f"scoring failed on {len(failed)} of {len(entries)} ({failed[0].score.failure})"
            return Status.PROBLEM, f"{reason}, {_example(failed[0])}"
        paid = [entry for entry in entries if _is_paid(entry)]
        share = f"paid in full on {len(paid)} of {len(entries)}"
        if kind is Kind.GOLD:
            unpaid = [entry for entry in entries if not _is_paid(entry) and "correct" in entry.score.parts]
            if unpaid:
                return Status.PROBLEM, f"not {share}, {_example(unpaid[0])}"
            return self._slow(entries)
        if paid and kind in (Kind.OTHER, Kind.NEAR):
            allowed = (self._constant_rate + COINCIDENCES) * len(entries) if kind is Kind.OTHER else 0
            if len(paid) <= allowed:
                return Status.OK, ""
            is_rule = len(paid) > max(allowed, len(entries) / 2)
            return (Status.PROBLEM if is_rule else Status.WARNING), f"{share}, {_example(paid[0])}"
        if paid:
            return Status.PROBLEM, f"{share}, {_example(paid[0])}"
        return self._part_credit(entries, gold)

    def _part_credit(self, entries: list[Scored], gold: list[Scored]) -> tuple[Status, str]:
        """Of probes that are never right: a mean that is too high, a reward that does not distinguish."""
        kind, example = entries[0].probe.kind, _example(entries[0])
        parts = _means([entry.score for entry in entries])
        golden = _means([entry.score for entry in gold])
        if kind is Kind.WORTHLESS and gold:
            reward, most = (fmean(entry.score.reward for entry in some) for some in (entries, gold))
            if reward >= most or reward > MOST_OF_GOLD * most > 0:
                text = f"the reward is {reward:.3g}, and {most:.3g} for the gold answer"
                return Status.PROBLEM if reward >= most else Status.WARNING, f"{text}, {example}"
        if kind in (Kind.WORTHLESS, Kind.HEDGE, Kind.SURROUNDED):
            for name in self._own:
                if name in golden and parts.get(name, 0.0) >= golden[name]:
                    text = f"{name} pays {parts[name]:.3g}, and {golden[name]:.3g} for the gold answer"
                    return Status.WARNING, f"{text}, {example}"
        limits = {Kind.WORTHLESS: MOST_FOR_JUNK, Kind.HEDGE: MOST_FOR_HEDGE, Kind.OTHER: MOST_FOR_OTHER}
        limit = limits.get(kind)
        if limit is not None and parts.get("accuracy", 0.0) > limit * max(1.0, golden.get("accuracy", 1.0)):
            return Status.WARNING, f"part credit of {parts['accuracy']:.2f} in the mean, {example}"
        return self._slow(entries)

    def _slow(self, entries: list[Scored]) -> tuple[Status, str]:
        slowest = max(entries, key=lambda entry: entry.seconds)
        if slowest.seconds <= SLOW * self._limit_s:
            return Status.OK, ""
        return Status.WARNING, f"scoring took {slowest.seconds:.1f} s, {_example(slowest)}"


def _is_paid(entry: Scored) -> bool:
    return entry.score.failure is None and entry.score.parts.get("correct", 0.0) >= 1


def _values(scores: Iterable[Score], part: str) -> list[float]:
    return [score.parts[part] for score in scores if score.failure is None and part in score.parts]


def _means(scores: Sequence[Score]) -> dict[str, float]:
    names = dict.fromkeys(name for score in scores for name in score.parts if name != "correct")
    return {name: fmean(values) for name in names if (values := _values(scores, name))}


def _example(entry: Scored) -> str:
    """`e.g. 'it is 5' on gcd/train/000001`; never more than a line."""
    text = entry.probe.text if entry.score.answer is None else entry.score.answer
    return f"e.g. {cut(repr(text), 60)} on {entry.problem.id}"


def as_dict(checks: Iterable[TaskCheck]) -> dict[str, Any]:
    """Plain data for JSON."""
    tasks = {check.task: [vars(result) for result in check.results] for check in checks}
    problems = sum(r["status"] is Status.PROBLEM for results in tasks.values() for r in results)
    return {"problems": problems, "tasks": tasks}
