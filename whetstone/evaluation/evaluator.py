"""The fixed evaluation: sample, count correct answers, compare with step 0, write eval_results/.

Problems and seeds are the same at every step, so two evaluations differ by the policy alone and are compared
in pairs. Accuracy counts `parts["correct"]`, never the reward.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from whetstone.config.sections import Config
from whetstone.evaluation.statistics import (
    Accuracy,
    Difference,
    accuracy,
    mean_interval,
    paired,
    pass_at_k_table,
)
from whetstone.files import atomic_write, json_safe
from whetstone.rollout.collector import GroupCollector, sampling_params
from whetstone.tasks.constants import constant_rates
from whetstone.terminal.stages import advance, stage
from whetstone.types import Finish, Group, Problem, count_occurrences

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EvalRecord:
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
    extra: Mapping[str, Any] = field(default_factory=dict)  # what reward functions gave to `log_extra`
    turns: tuple[Mapping[str, Any], ...] = ()  # of an episode: the messages behind the prompt

    @property
    def is_judged(self) -> bool:
        """Whether there was an answer to compare with: rows of the user's own may have none."""
        return "correct" in self.parts


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    accuracy: Accuracy
    mean_length: float
    clipped_ratio: float
    delta_vs_step0: Difference | None
    constant: float | None = None  # what the best constant answer earns, where that was measured


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
    clipped_ratio: float
    num_failures: int  # answers whose scoring failed
    delta_vs_step0: Difference | None  # None at step 0, and where step 0 was not the same evaluation
    completions: tuple[EvalRecord, ...]
    greedy_completions: tuple[EvalRecord, ...]
    reward: Accuracy  # mean and interval of the reward
    unchanged: frozenset[str] = frozenset()  # problems whose first sample is that of step 0
    is_judged: bool = True  # False: the problems have no known answers; only the reward counts

    def summary(self) -> dict[str, Any]:
        """The numbers alone, as plain data."""
        left_out = ("completions", "greedy_completions", "unchanged")
        return {key: value for key, value in asdict(self).items() if key not in left_out}

    def metrics(self) -> dict[str, float]:
        row = {
            "reward": self.reward.mean,
            "reward_low": self.reward.low,
            "reward_high": self.reward.high,
            "completions/mean_length": self.mean_length,
            "completions/clipped_ratio": self.clipped_ratio,
        }
        if not self.is_judged:
            return row
        row |= {
            "accuracy": self.accuracy.mean,
            "accuracy_low": self.accuracy.low,
            "accuracy_high": self.accuracy.high,
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
        self, config: Config, problems: Sequence[Problem], collector: GroupCollector, run_folder: str | Path
    ) -> None:
        assert problems, "an evaluation without problems: leave it out instead"
        self._config = config
        self._problems = count_occurrences(problems)
        self._collector = collector
        self._folder = Path(run_folder) / "eval_results"
        temperature = config.evaluation.eval_temperature
        self.temperature = config.rollout.temperature if temperature is None else temperature
        # Greedy samples of one problem are all the same: one is enough.
        self.samples_per_problem = config.evaluation.eval_samples_per_problem if self.temperature > 0 else 1

    def run(self, step: int, *, greedy: bool) -> EvalResult:
        """Sample, count and write `eval_step_N.json`; `greedy` adds a pass at temperature 0."""
        name = f"evaluation at step {step}"
        completions = self._sample_records(name, self.temperature, self.samples_per_problem)
        greedy_completions: list[EvalRecord] = []
        if self.temperature == 0:  # the evaluation is the greedy pass
            greedy_completions = completions
        elif greedy:
            greedy_completions = self._sample_records("greedy evaluation", 0.0, 1)
        result = self._summarize(step, completions, greedy_completions)
        document = {
            "step": step,
            "summary": result.summary(),
            "completions": [asdict(record) for record in completions],
            "greedy_completions": [asdict(record) for record in greedy_completions],
        }
        text = json.dumps(json_safe(document), ensure_ascii=False, indent=1)
        atomic_write(self._folder / f"eval_step_{step}.json", text)
        return result

    def _summarize(
        self, step: int, completions: list[EvalRecord], greedy_completions: list[EvalRecord]
    ) -> EvalResult:
        start = None if step == 0 else self._start_records()
        constants = constant_rates(self._config.tasks.eval_datasets or self._config.tasks.datasets)
        table = _correctness(completions)
        is_judged = any(record.is_judged for record in completions if record.failure is None)
        is_judged = is_judged or all(record.failure is not None for record in completions)
        per_task = {}
        for name in dict.fromkeys(record.task for record in completions):
            of_task = [record for record in completions if record.task == name]
            before = None if start is None else [record for record in start if record.task == name]
            delta = None if before is None else paired(_correctness(before), _correctness(of_task))
            per_task[name] = TaskResult(
                accuracy=accuracy(_correctness(of_task)),
                mean_length=fmean(a.length for a in of_task),
                clipped_ratio=fmean(a.finish == Finish.LENGTH for a in of_task),
                delta_vs_step0=delta,
                constant=constants.get(name),
            )
        return EvalResult(
            step=step,
            temperature=self.temperature,
            samples_per_problem=len(table[0]),
            accuracy=accuracy(table),
            greedy_accuracy=accuracy(_correctness(greedy_completions)) if greedy_completions else None,
            pass_at_k=pass_at_k_table(table),
            per_task=per_task,
            mean_length=fmean(a.length for a in completions),
            clipped_ratio=fmean(a.finish == Finish.LENGTH for a in completions),
            num_failures=sum(a.failure is not None for a in completions),
            delta_vs_step0=None if start is None or not is_judged else paired(_correctness(start), table),
            completions=tuple(completions),
            greedy_completions=tuple(greedy_completions),
            reward=mean_interval(_by_problem(completions, lambda record: record.reward)),
            unchanged=frozenset(
                new.problem
                for old, new in zip(start or (), completions, strict=False)
                if new.sample == 0 and new.completion == old.completion
            ),
            is_judged=is_judged,
        )

    def _sample_records(self, name: str, temperature: float, num_samples: int) -> list[EvalRecord]:
        sampling = sampling_params(self._config, temperature)
        at_once = self._config.evaluation.per_device_eval_batch_size
        size = max(1, at_once // num_samples) if at_once else len(self._problems)
        records: list[EvalRecord] = []
        batches = [self._problems[i : i + size] for i in range(0, len(self._problems), size)]
        seed_parts = (self._config.run.seed, "eval")
        with stage(name, total=len(batches)):
            for batch in batches:
                groups = self._collector.collect(
                    batch, num_samples=num_samples, sampling=sampling, seed_parts=seed_parts
                )
                records += [record for group in groups for record in _records(group)]
                advance()
        return records

    def _start_records(self) -> list[EvalRecord] | None:
        """The records of step 0, from its file (a resumed run wasn't there); None if not comparable."""
        path = self._folder / "eval_step_0.json"
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            temperature = document["summary"]["temperature"]
            records = [EvalRecord(**entry) for entry in document["completions"]]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            logger.warning("%s can't be read: no comparison with step 0.", path)
            return None
        samples = range(self.samples_per_problem)
        here = [(problem.id, sample) for problem in self._problems for sample in samples]
        if [(a.problem, a.sample) for a in records] != here or temperature != self.temperature:
            logger.warning("%s has other problems or another temperature: no comparison with step 0.", path)
            return None
        return records


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


def _records(group: Group) -> list[EvalRecord]:
    problem = group.problem
    return [
        EvalRecord(
            problem=problem.id,
            task=problem.task,
            sample=i,
            messages=tuple(dict(message) for message in problem.messages),
            gold=plain_answer(problem.answer),
            completion=rollout.text,
            # Where scoring failed there may be no verdict: such an answer is not right.
            correct=(rollout.score.parts.get("correct", 0.0) if rollout.score.failure is None else 0.0) >= 1,
            length=len(rollout.completion.token_ids),
            finish=str(rollout.completion.finish),
            turns=() if rollout.episode is None else tuple(map(dict, rollout.episode.messages)),
            **vars(rollout.score),
        )
        for i, rollout in enumerate(group.rollouts)
    ]


def plain_answer(answer: Any) -> str | None:
    """The right answer for a reader: text and numbers as they are, a row's field `answer`, or nothing."""
    if isinstance(answer, Mapping):
        answer = answer.get("answer")
    return str(answer) if isinstance(answer, str | int | float) else None


def _correctness(records: Sequence[EvalRecord]) -> list[list[bool]]:
    """Right or wrong, a row per problem in the order of the problems."""
    return _by_problem(records, lambda record: record.correct)


def _by_problem(records: Sequence[EvalRecord], value: Callable[[EvalRecord], Any]) -> list[list[Any]]:
    rows: dict[str, list[Any]] = {}
    for record in records:
        rows.setdefault(record.problem, []).append(value(record))
    return list(rows.values())
