"""What the checks of a run look at (`RunHistory`) and what they answer (`Diagnosis`). No judgement in here.

Early and late are means over the first and the last fifth of the rows, at least three of them: one step of a
few prompts says little.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

SIGNIFICANT = 2.5  # standard errors; more than two, since the best of several evaluations is compared


class Severity(IntEnum):
    """How much a verdict matters; the first stands first."""

    GRAVE = 0  # the run can't get better like this
    WARNING = 1  # it loses something
    NOTE = 2  # good to know


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """One thing that the metrics say: what, by which numbers, and the setting to change."""

    title: str
    evidence: str
    remedy: str
    severity: Severity = Severity.WARNING


@dataclass(frozen=True, kw_only=True)
class Drop:
    """An accuracy that was clearly better before."""

    of_what: str
    best: float
    best_step: int
    last: float
    fell_step: int  # the first step at which half of what was lost was gone

    @property
    def is_collapse(self) -> bool:
        return self.last < 0.7 * self.best


class RunHistory:
    """The metrics of one run, with the few ways of looking at them that the checks share."""

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
    ) -> None:
        self.rows = sorted(rows, key=lambda row: row["step"])
        judged = [row for row in evals if row.get("accuracy") is not None]  # rows without answers have none
        self.evals = sorted(judged, key=lambda row: row["step"])
        self.config = config

    def column(self, key: str) -> list[float]:
        """A metric of training, where it is a number."""
        return [float(row[key]) for row in self.rows if row.get(key) is not None]

    def early(self, key: str) -> float | None:
        return _mean(self.column(key)[: self._window(key)])

    def late(self, key: str) -> float | None:
        return _mean(self.column(key)[-self._window(key) :])

    def recent(self, key: str, default: float = 0.0) -> float:
        """The late mean, where the metric exists."""
        value = self.late(key)
        return default if value is None else value

    def risen_entropy(self) -> tuple[float, float] | None:
        """Entropy of the first row and now, where it rose so far that the answers are noise."""
        early, late = self.column("entropy")[:1], self.late("entropy")
        if not early or late is None or late <= max(1.0, 3 * early[0]):
            return None
        return early[0], late

    def total(self, key: str) -> float:
        return math.fsum(self.column(key))

    def _window(self, key: str) -> int:
        return max(3, len(self.column(key)) // 5)

    @property
    def reward_variance(self) -> float | None:
        """The fraction of recent prompts whose completions have different rewards.

        None where it is not logged, or where the baseline is no group: a critic's, of one completion.
        """
        zero_std = self.late("frac_reward_zero_std")
        return None if zero_std is None or self.config.get("num_generations") == 1 else 1 - zero_std

    @property
    def completions_per_row(self) -> int:
        """Completions behind one row of training: how far a share in it can be trusted."""
        generations = int(self.config.get("num_generations") or 8)
        prompts = self.config.get("prompts_per_step")
        if prompts:
            return int(prompts) * generations
        size = int(self.config.get("per_device_train_batch_size") or 8)
        return max(generations, size * int(self.config.get("gradient_accumulation_steps") or 1))

    @property
    def prompts_per_row(self) -> int:
        return max(1, self.completions_per_row // int(self.config.get("num_generations") or 8))

    @property
    def is_supervised(self) -> bool:
        return self.config.get("loss_type") == "sft"

    @property
    def updates_per_batch(self) -> int:
        accumulation = int(self.config.get("gradient_accumulation_steps") or 1)
        parts = int(self.config.get("steps_per_generation") or accumulation) // accumulation
        return parts * int(self.config.get("num_iterations") or 1)

    @property
    def accuracy(self) -> float:
        """The newest accuracy: on the evaluation problems where there are some, else in training."""
        if len(self.evals) > 1:
            return float(self.evals[-1]["accuracy"])
        return self.recent("accuracy")

    @property
    def gain(self) -> float | None:
        """Accuracy now minus accuracy at the start; None where there is only one look at it."""
        if len(self.evals) > 1:
            return float(self.evals[-1]["accuracy"]) - float(self.evals[0]["accuracy"])
        early, late = self.early("accuracy"), self.late("accuracy")
        return None if early is None or late is None or len(self.rows) < 6 else late - early

    def evaluated_gain(self) -> tuple[float, float]:
        """Accuracy in the newest evaluation minus that in the first, and its standard error."""
        first, last = self.evals[0], self.evals[-1]
        gain = float(last["accuracy"]) - float(first["accuracy"])
        return gain, math.hypot(_standard_error(first), _standard_error(last))

    @property
    def rose(self) -> bool:
        """Whether accuracy rose by more than chance explains."""
        if len(self.evals) > 1:
            last = self.evals[-1]
            p_value = last.get("delta_vs_step0_p")
            if p_value is not None:
                return float(last["delta_vs_step0"]) > 0 and float(p_value) < 0.05
            return float(last["accuracy_low"]) > float(self.evals[0]["accuracy_high"])
        return self.rose_in_training

    @property
    def rose_in_training(self) -> bool:
        """Whether accuracy on the training problems rose by more than chance explains."""
        early, late = self.early("accuracy"), self.late("accuracy")
        if early is None or late is None or len(self.rows) < 6:
            return False
        num = self._window("accuracy")
        return late - early > 3 * math.hypot(self._noise(early, num), self._noise(late, num))

    def fall(self) -> Drop | None:
        """The clearest fall of accuracy from its best, beyond chance: in evaluations, else in training."""
        return self._fall_of_evals() or self._fall_of_training()

    def _fall_of_evals(self) -> Drop | None:
        if len(self.evals) < 2:
            return None
        best = max(self.evals, key=lambda row: row["accuracy"])
        last = self.evals[-1]
        error = math.hypot(_standard_error(best), _standard_error(last))
        if float(best["accuracy"]) - float(last["accuracy"]) <= SIGNIFICANT * error:
            return None
        pairs = [(row["step"], float(row["accuracy"])) for row in self.evals]
        fall = _fall("accuracy on the evaluation problems", pairs, best["step"])
        return replace(fall, fell_step=self._fell_in_training(fall))

    def _fell_in_training(self, fall: Drop) -> int:
        """Evaluations are far apart: training rows between them tell more closely when it fell."""
        fell = fall.fell_step
        between = [row for row in self.rows if fall.best_step < row["step"] <= fall.fell_step]
        for row in reversed(between):
            if row.get("accuracy") is None or float(row["accuracy"]) > (fall.best + fall.last) / 2:
                break
            fell = row["step"]
        return fell

    def _fall_of_training(self) -> Drop | None:
        num = max(1, len(self.rows) // 10)
        values = self.column("accuracy")
        if len(values) < 6 or len(values) != len(self.rows):
            return None
        means = [math.fsum(values[i : i + num]) / num for i in range(len(values) - num + 1)]
        pairs = [(self.rows[i + num - 1]["step"], value) for i, value in enumerate(means)]
        best_step, best = max(pairs, key=lambda pair: pair[1])
        last = self.recent("accuracy")
        if best - last < max(0.1, 4 * self._noise(best, num)):
            return None
        return _fall("accuracy in training", [*pairs, (self.rows[-1]["step"], last)], best_step)

    def _noise(self, share: float, num_rows: int) -> float:
        """Standard error of a share over some rows, never 0: few prompts can't be sure of 0 or 1.

        Prompts count, not completions: those of a prompt are alike, the more so the longer a run is.
        """
        num = num_rows * self.prompts_per_row
        share = (share * num + 1) / (num + 2)
        return math.sqrt(share * (1 - share) / num)


def _fall(of_what: str, pairs: list[tuple[int, float]], best_step: int) -> Drop:
    best = max(value for step, value in pairs if step == best_step)
    last = pairs[-1][1]
    half = (best + last) / 2
    fell = next(step for step, value in pairs if step > best_step and value <= half)
    return Drop(of_what=of_what, best=best, best_step=best_step, last=last, fell_step=fell)


def _standard_error(row: Mapping[str, Any]) -> float:
    """Of an evaluation's accuracy, by its 95 % interval."""
    return (float(row["accuracy_high"]) - float(row["accuracy_low"])) / (2 * 1.96)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def percent(share: float) -> str:
    """`12.5 %`, `0 %`"""
    return f"{100 * share:.3g} %"
