"""The fixed problems that progress is measured on: sample, count, compare with step 0, write down, show.

The same problems every time, with seeds that depend on the problem and not on the step, so that two
evaluations differ only by the policy and can be compared in pairs. Counts `parts["correct"]`, never the
reward that training maximises. Every completion goes to `eval_results/eval_step_N.json`. The mathematics is
in `statistics.py`; no torch here.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import rich
from rich.console import Console
from rich.console import Group as Stacked
from rich.padding import Padding
from rich.table import Table as TerminalTable
from rich.text import Text

from whetstone.config.sections import Config
from whetstone.engines.base import Sampling
from whetstone.evaluation.statistics import (
    Accuracy,
    Difference,
    accuracy,
    mean_interval,
    paired,
    pass_at_k_table,
)
from whetstone.files import atomic_write, json_safe
from whetstone.rollout.collector import sampling_at
from whetstone.terminal.log import STEP_LINES
from whetstone.terminal.stages import advance, stage
from whetstone.terminal.text import counted, escape_controls, wrap
from whetstone.types import Finish, Group, Problem

logger = logging.getLogger(__name__)


class Collects(Protocol):
    """What is needed of `rollout.Collector`."""

    def collect(
        self,
        problems: list[Problem],
        *,
        num_samples: int,
        sampling: Sampling,
        seed_parts: tuple[int | str, ...],
    ) -> list[Group]: ...


@dataclass(frozen=True, kw_only=True)
class Answered:
    """One completion of an evaluation, as it is written to the file."""

    problem: str  # the problem's id
    task: str
    sample: int
    messages: tuple[Mapping[str, str], ...]
    gold: str | None  # the right answer where it is plain text or a number
    completion: str
    answer: str | None  # what was taken for the answer
    correct: bool
    parts: Mapping[str, float]
    length: int  # tokens
    finish: str
    failure: str | None  # why scoring failed, if it did: such an answer counts as wrong
    outcome: str | None = None  # how a program fared
    tests: tuple[str, ...] = ()  # and each of its tests
    reward: float = 0.0  # what training would have paid

    @property
    def is_judged(self) -> bool:
        """Whether there was an answer to compare with: rows of the user's own may have none."""
        return "correct" in self.parts


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """One task's share of an evaluation."""

    accuracy: Accuracy
    mean_length: float
    clipped_ratio: float
    delta_vs_step0: Difference | None


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """An evaluation in numbers, and the completions behind them."""

    step: int
    temperature: float
    samples_per_problem: int
    accuracy: Accuracy
    greedy_accuracy: Accuracy | None
    pass_at_k: dict[int, float]
    per_task: dict[str, TaskResult]
    mean_length: float
    clipped_ratio: float  # completions that were truncated
    num_failures: int  # answers whose scoring failed
    delta_vs_step0: Difference | None  # None at step 0, and where step 0 was not the same evaluation
    completions: tuple[Answered, ...]
    greedy_completions: tuple[Answered, ...]
    reward: Accuracy  # mean and interval of the reward
    is_judged: bool = True  # False: no answers to compare with, so that only the reward tells anything

    def summary(self) -> dict[str, Any]:
        """The numbers alone, as plain data."""
        return {
            key: value
            for key, value in asdict(self).items()
            if key not in ("completions", "greedy_completions")
        }

    def row(self) -> dict[str, float]:
        """The numbers as one row of metrics."""
        row = {"reward": self.reward.mean, "reward_low": self.reward.low, "reward_high": self.reward.high}
        if not self.is_judged:
            return row | {
                "completions/mean_length": self.mean_length,
                "completions/clipped_ratio": self.clipped_ratio,
            }
        row |= {
            "accuracy": self.accuracy.mean,
            "accuracy_low": self.accuracy.low,
            "accuracy_high": self.accuracy.high,
            "completions/mean_length": self.mean_length,
            "completions/clipped_ratio": self.clipped_ratio,
            "scoring_failures": float(self.num_failures),
        }
        if self.greedy_accuracy is not None:
            row["greedy_accuracy"] = self.greedy_accuracy.mean
        if self.samples_per_problem > 1:
            row |= {f"pass@{k}": value for k, value in self.pass_at_k.items()}
        if len(self.per_task) > 1:
            row |= {f"accuracy/{name}": task.accuracy.mean for name, task in self.per_task.items()}
        if self.delta_vs_step0 is not None:
            row |= {
                "delta_vs_step0": self.delta_vs_step0.difference,
                "delta_vs_step0_p": self.delta_vs_step0.p_value,
            }
        return row


class Evaluator:
    """Evaluates the policy behind `collector` on `problems`, as often as it is asked to."""

    def __init__(
        self, config: Config, problems: Sequence[Problem], collector: Collects, run_folder: str | Path
    ) -> None:
        assert problems, "an evaluation without problems: leave it out instead"
        self._config = config
        self._problems = list(problems)
        self._collector = collector
        self._folder = Path(run_folder) / "eval_results"
        given = config.evaluation.eval_temperature
        self.temperature = config.rollout.temperature if given is None else given
        # Greedy samples of one problem are all the same: one is enough.
        self.samples_per_problem = config.evaluation.eval_samples_per_problem if self.temperature > 0 else 1

    def run(self, step: int, *, greedy: bool) -> EvalResult:
        """Sample, count and write `eval_step_N.json`; `greedy` adds a pass at temperature 0."""
        completions = self._answers(f"evaluation at step {step}", self.temperature, self.samples_per_problem)
        greedy_completions: list[Answered] = []
        if greedy and self.temperature > 0:
            greedy_completions = self._answers("greedy evaluation", 0.0, 1)
        if self.temperature == 0:  # the evaluation is the greedy pass
            greedy_completions = completions
        start = None if step == 0 else self._completions_of_start()
        result = _summarise(
            step=step,
            temperature=self.temperature,
            completions=completions,
            greedy_completions=greedy_completions,
            start=start,
        )
        document = {
            "step": step,
            "summary": result.summary(),
            "completions": [asdict(answered) for answered in completions],
            "greedy_completions": [asdict(answered) for answered in greedy_completions],
        }
        atomic_write(self._file(step), json.dumps(json_safe(document), ensure_ascii=False, indent=1))
        return result

    def _file(self, step: int) -> Path:
        return self._folder / f"eval_step_{step}.json"

    def _answers(self, name: str, temperature: float, num_samples: int) -> list[Answered]:
        sampling = sampling_at(self._config, temperature)
        at_once = self._config.evaluation.per_device_eval_batch_size
        size = max(1, at_once // num_samples) if at_once else len(self._problems)
        answers: list[Answered] = []
        parts = [self._problems[i : i + size] for i in range(0, len(self._problems), size)]
        with stage(name, total=len(parts)):
            for part in parts:
                groups = self._collector.collect(
                    part,
                    num_samples=num_samples,
                    sampling=sampling,
                    seed_parts=(self._config.run.seed, "eval"),
                )
                answers += [answered for group in groups for answered in _read(group)]
                advance()
        return answers

    def _completions_of_start(self) -> list[Answered] | None:
        """The answers of step 0, from its file (a resumed run wasn't there); None if not comparable."""
        path = self._file(0)
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            temperature = document["summary"]["temperature"]
            answers = [Answered(**entry) for entry in document["completions"]]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            logger.warning("%s can't be read: there is no comparison with step 0.", path)
            return None
        here = [
            (problem.id, sample) for problem in self._problems for sample in range(self.samples_per_problem)
        ]
        if [(a.problem, a.sample) for a in answers] != here or temperature != self.temperature:
            logger.warning(
                "%s holds other problems or another temperature: there is no comparison with step 0.", path
            )
            return None
        return answers


def read_summary(path: Path) -> dict[str, Any] | None:
    """The numbers of an evaluation's file; None where it is missing or damaged."""
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))["summary"]
        Accuracy(**summary["accuracy"])
        if summary["greedy_accuracy"] is not None:
            Accuracy(**summary["greedy_accuracy"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        logger.warning("%s can't be read: the results have no accuracy before training.", path)
        return None
    return summary


def _read(group: Group) -> list[Answered]:
    """A scored group as records."""
    problem = group.problem
    return [
        Answered(
            problem=problem.id,
            task=problem.task,
            sample=i,
            messages=tuple(dict(message) for message in problem.messages),
            gold=plain_answer(problem.answer),
            completion=rollout.text,
            answer=rollout.score.answer,
            # Where scoring failed there may be no verdict: such an answer is not right.
            correct=(rollout.score.parts.get("correct", 0.0) if rollout.score.failure is None else 0.0) >= 1,
            parts=dict(rollout.score.parts),
            length=len(rollout.completion.token_ids),
            finish=str(rollout.completion.finish),
            failure=rollout.score.failure,
            outcome=rollout.score.outcome,
            tests=rollout.score.tests,
            reward=rollout.score.reward,
        )
        for i, rollout in enumerate(group.rollouts)
    ]


def plain_answer(answer: Any) -> str | None:
    """The right answer for a reader: text and numbers as they are, a row's field `answer`, or nothing."""
    if isinstance(answer, Mapping):
        answer = answer.get("answer")
    return str(answer) if isinstance(answer, str | int | float) else None


def _table(answers: Sequence[Answered]) -> list[list[bool]]:
    """Right or wrong, a row per problem in the order of the problems."""
    return _by_problem(answers, lambda answered: answered.correct)


def _by_problem(answers: Sequence[Answered], value: Callable[[Answered], Any]) -> list[list[Any]]:
    rows: dict[str, list[Any]] = {}
    for answered in answers:
        rows.setdefault(answered.problem, []).append(value(answered))
    return list(rows.values())


def _summarise(
    *,
    step: int,
    temperature: float,
    completions: list[Answered],
    greedy_completions: list[Answered],
    start: list[Answered] | None,
) -> EvalResult:
    table = _table(completions)
    is_judged = any(answered.is_judged for answered in completions if answered.failure is None)
    is_judged = is_judged or all(answered.failure is not None for answered in completions)
    per_task = {}
    for name in dict.fromkeys(answered.task for answered in completions):
        of_task = [answered for answered in completions if answered.task == name]
        before = None if start is None else [answered for answered in start if answered.task == name]
        per_task[name] = TaskResult(
            accuracy=accuracy(_table(of_task)),
            mean_length=_mean(a.length for a in of_task),
            clipped_ratio=_mean(a.finish == Finish.LENGTH for a in of_task),
            delta_vs_step0=None if before is None else paired(_table(before), _table(of_task)),
        )
    return EvalResult(
        step=step,
        temperature=temperature,
        samples_per_problem=len(table[0]),
        accuracy=accuracy(table),
        greedy_accuracy=accuracy(_table(greedy_completions)) if greedy_completions else None,
        pass_at_k=pass_at_k_table(table),
        per_task=per_task,
        mean_length=_mean(a.length for a in completions),
        clipped_ratio=_mean(a.finish == Finish.LENGTH for a in completions),
        num_failures=sum(a.failure is not None for a in completions),
        delta_vs_step0=None if start is None or not is_judged else paired(_table(start), table),
        completions=tuple(completions),
        greedy_completions=tuple(greedy_completions),
        reward=mean_interval(_by_problem(completions, lambda answered: answered.reward)),
        is_judged=is_judged,
    )


def _mean(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values)


# ---- the terminal ------------------------------------------------------------------------------------------


def show(
    result: EvalResult, *, num_examples: int, title: str | None = None, console: Console | None = None
) -> None:
    """Print a headline (it goes to the log too), a table where there are several tasks, examples."""
    console = console or rich.get_console()
    title = escape_controls(title or f"Evaluation at step {result.step}")
    first = f"{title}  {headline(result)}"
    first = Text(wrap(first, console.width) if console.is_terminal else first)
    first.stylize("bold", 0, len(title))
    parts: list[Any] = [_example(answered) for answered in examples(result, num_examples)]
    if len(result.per_task) > 1:
        parts.insert(0, _task_table(result))
    console.print(first, highlight=False, soft_wrap=True)
    console.print(Stacked(*(Padding(part, (0, 0, 0, 2), expand=False) for part in parts)), highlight=False)
    logging.getLogger(STEP_LINES).info("%s: %s", title, headline(result))


def headline(result: EvalResult) -> str:
    """`accuracy 61.5 % [54.6, 68.0] on 200 problems at temperature 1; greedy ...; +27.0 points since ...`"""
    measured = (
        f"accuracy {percent(result.accuracy)}" if result.is_judged else f"reward {plain(result.reward)}"
    )
    tell = [f"{measured} on {counted(result.accuracy.num_problems, 'problem')}"]
    if result.samples_per_problem > 1:
        tell[0] += f" x {result.samples_per_problem}"
    tell[0] += " greedily" if result.temperature == 0 else f" at temperature {result.temperature:g}"
    if result.greedy_accuracy is not None and result.temperature > 0 and result.is_judged:
        tell.append(f"greedy {percent(result.greedy_accuracy)}")
    if result.samples_per_problem > 1 and result.is_judged:
        tell.append(
            ", ".join(f"pass@{k} {100 * value:.1f} %" for k, value in result.pass_at_k.items() if k > 1)
        )
    if result.delta_vs_step0 is not None:
        tell.append(change(result.delta_vs_step0))
    if result.clipped_ratio > 0:
        tell.append(f"{100 * result.clipped_ratio:.1f} % truncated")
    if result.num_failures:
        failures = counted(result.num_failures, "answer")
        tell.append(f"{failures} could not be scored: counted as wrong")
    return "; ".join(tell)


def percent(share: Accuracy) -> str:
    """`61.5 % [54.6, 68.0]`"""
    return f"{100 * share.mean:.1f} % [{100 * share.low:.1f}, {100 * share.high:.1f}]"


def plain(mean: Accuracy) -> str:
    """`0.615 [0.546, 0.680]`"""
    return f"{mean.mean:.3g} [{mean.low:.3g}, {mean.high:.3g}]"


def change(versus: Difference) -> str:
    """`+27.0 points since step 0 [19.8, 33.9], p < 0.001`"""
    low, high = 100 * versus.low, 100 * versus.high
    p_value = "p < 0.001" if versus.p_value < 0.001 else f"p = {versus.p_value:.3f}"
    return f"{100 * versus.difference:+.1f} points since step 0 [{low:+.1f}, {high:+.1f}], {p_value}"


def _task_table(result: EvalResult) -> TerminalTable:
    table = TerminalTable(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("task")
    compared = result.delta_vs_step0 is not None
    for name in ("problems", "accuracy %", "95 %", *(["since step 0"] if compared else []), "tokens"):
        table.add_column(name, justify="right")
    for name, task in result.per_task.items():
        share, versus = task.accuracy, task.delta_vs_step0
        table.add_row(
            Text(escape_controls(name)),
            str(share.num_problems),
            f"{100 * share.mean:.1f}",
            Text(f"[{100 * share.low:.1f}, {100 * share.high:.1f}]"),
            *([f"{100 * versus.difference:+.1f}"] if versus is not None else []),
            f"{task.mean_length:.0f}",
        )
    return table


def examples(result: EvalResult, num: int) -> list[Answered]:
    """First samples of `num` problems spread evenly: always the same ones, to watch them change."""
    firsts = [answered for answered in result.completions if answered.sample == 0]
    num = min(num, len(firsts))
    return [firsts[i * len(firsts) // num] for i in range(num)]


def _example(answered: Answered) -> TerminalTable:
    verdict = Text("right", "bold green") if answered.correct else Text("wrong", "bold red")
    if not answered.is_judged:
        verdict = Text(f"reward {answered.reward:.3g}", "bold")
    gold = "" if answered.gold is None else f"   gold {_short(answered.gold, 120)}"
    answer = "no answer found" if answered.answer is None else f"answer {_short(answered.answer, 120)}"
    table = TerminalTable.grid(padding=(0, 2, 0, 0))
    table.add_row(Text("question", "dim"), Text(_short(answered.messages[-1]["content"], 400)))
    table.add_row(Text("completion", "dim"), Text(_short(answered.completion, 600)))
    length = counted(answered.length, "token")
    table.add_row(Text("verdict", "dim"), verdict.append(f"   {answer}{gold}   ({length})", ""))
    table.add_row()
    return table


def _short(text: str, limit: int) -> str:
    """One line of at most `limit` characters, its middle left out: beginnings and ends say most."""
    text = escape_controls(" ".join(text.split()))
    half = (limit - 5) // 2
    return text if len(text) <= limit else f"{text[:half]} ... {text[-half:]}"
