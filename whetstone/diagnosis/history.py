"""What the checks of a run look at (`RunHistory`) and what they answer (`Diagnosis`). No judgement in here.

Early and late are means over the first and the last fifth of the rows, at least three of them: one step of a
few prompts says little.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from statistics import pstdev
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
    """An accuracy (or reward) that was clearly better before."""

    of_what: str
    best: float
    best_step: int
    last: float
    fell_step: int  # the first step at which half of what was lost was gone
    is_collapse: bool


class RunHistory:
    """The metrics of one run, with the few ways of looking at them that the checks share."""

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
    ) -> None:
        self.rows = sorted(rows, key=lambda row: row["step"])
        # Rows without answers have only a reward.
        self.is_judged = any(row.get("accuracy") is not None for row in (*rows, *evals))
        self.measure = "accuracy" if self.is_judged else "reward"
        needed = (self.measure, f"{self.measure}_low", f"{self.measure}_high")
        whole = [row for row in evals if all(row.get(key) is not None for key in needed)]
        self.evals = sorted(whole, key=lambda row: row["step"])
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

    @property
    def lost_steps(self) -> float:
        """Optimizer steps whose loss or gradient was not finite; JSON has null for such numbers."""
        nulls = [any(row.get(key, 0) is None for key in ("loss", "grad_norm")) for row in self.rows]
        return max(sum(self.column("skipped_steps")), sum(nulls))

    @property
    def in_warmup(self) -> bool:
        """Whether the learning rate has only risen so far, and is below the configured one."""
        rates, full = self.column("learning_rate"), float(self.config.get("learning_rate") or 0.0)
        has_warmup = self.config.get("warmup_steps") or self.config.get("warmup_ratio")
        return bool(has_warmup and rates) and rates[-1] == max(rates) < 0.99 * full

    def _window(self, key: str) -> int:
        return max(3, len(self.column(key)) // 5)

    @property
    def reward_variance(self) -> float | None:
        """The fraction of recent prompts whose completions have different rewards.

        None if it is not logged. Without a group as baseline: 0 if all rewards of a batch are equal, or None.
        """
        grouped = self.config.get("advantage", "group") in ("group", "rloo")
        if not grouped or self.config.get("num_generations") == 1:
            return 0.0 if self.late("reward_std") == 0 else None
        zero_std = self.late("frac_reward_zero_std")
        return None if zero_std is None else 1 - zero_std

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
    def is_supervised(self) -> bool:
        return self.config.get("loss_type") == "sft"

    @property
    def updates_per_batch(self) -> int:
        accumulation = int(self.config.get("gradient_accumulation_steps") or 1)
        parts = int(self.config.get("steps_per_generation") or accumulation) // accumulation
        return parts * int(self.config.get("num_iterations") or 1)

    @property
    def score(self) -> float:
        """The newest accuracy or reward: on the evaluation problems if there are some, else in training."""
        return float(self.evals[-1][self.measure]) if len(self.evals) > 1 else self.recent(self.measure)

    @property
    def gain(self) -> float | None:
        """The score now minus that at the start; None where there is only one look at it."""
        if len(self.evals) > 1:
            return self.score - float(self.evals[0][self.measure])
        early, late = self.early(self.measure), self.late(self.measure)
        return None if early is None or late is None or len(self.rows) < 6 else late - early

    def shown(self, score: float) -> str:
        """`60 %`; a reward as a number."""
        return percent(score) if self.is_judged else f"{score:.3g}"

    def shown_gain(self, gain: float) -> str:
        return f"{100 * gain:+.1f} points" if self.is_judged else f"{gain:+.3g}"

    @property
    def rose(self) -> bool:
        """Whether the score rose by more than chance explains."""
        if len(self.evals) > 1:
            first, last = self.evals[0], self.evals[-1]
            gain, p_value = last.get("delta_vs_step0"), last.get("delta_vs_step0_p")
            if gain is not None and p_value is not None:
                return float(gain) > 0 and float(p_value) < 0.05
            return float(last[f"{self.measure}_low"]) > float(first[f"{self.measure}_high"])
        return self.rose_in_training

    @property
    def rose_in_training(self) -> bool:
        """Whether the score on the training problems rose by more than chance explains."""
        early, late = self.early(self.measure), self.late(self.measure)
        if early is None or late is None or len(self.rows) < 6:
            return False
        num = self._window(self.measure)
        return late - early > max(1e-9, 3 * math.hypot(self._noise(early, num), self._noise(late, num)))

    def fall(self) -> Drop | None:
        """The clearest fall of the score from its best, beyond chance: in evaluations, else in training."""
        return self._fall_of_evals() or self._fall_of_training()

    def _fall_of_evals(self) -> Drop | None:
        if len(self.evals) < 2:
            return None
        best = max(self.evals, key=lambda row: row[self.measure])
        last = self.evals[-1]
        error = self.standard_error(best, last)
        if float(best[self.measure]) - float(last[self.measure]) <= SIGNIFICANT * error:
            return None
        pairs = [(row["step"], float(row[self.measure])) for row in self.evals]
        fall = self._fall(f"{self.measure} on the evaluation problems", pairs, best["step"])
        return replace(fall, fell_step=self._fell_in_training(fall))

    def _fell_in_training(self, fall: Drop) -> int:
        """Evaluations are far apart: training rows between them tell more closely when it fell."""
        fell = fall.fell_step
        between = [row for row in self.rows if fall.best_step < row["step"] <= fall.fell_step]
        for row in reversed(between):
            if row.get(self.measure) is None or float(row[self.measure]) > (fall.best + fall.last) / 2:
                break
            fell = row["step"]
        return fell

    def _fall_of_training(self) -> Drop | None:
        """The best tenth of the run against the rows after it, at most a fifth of the run."""
        rows = [row for row in self.rows if row.get(self.measure) is not None]
        values, num = self.column(self.measure), max(1, len(rows) // 10)
        if len(rows) < 6:
            return None
        means = [sum(values[i : i + num]) / num for i in range(len(values) - num + 1)]
        at = max(range(len(means)), key=means.__getitem__)
        after = values[at + num :][-self._window(self.measure) :]
        if len(after) < 3:  # it is at its best now: one or two bad steps say little
            return None
        best, last = means[at], sum(after) / len(after)
        error = math.hypot(self._noise(best, num), self._noise(last, len(after)))
        if best - last < max(0.2 * self._spread, 4 * error):
            return None
        pairs = [(rows[i + num - 1]["step"], value) for i, value in enumerate(means)]
        pairs.append((rows[-1]["step"], last))
        return self._fall(f"{self.measure} in training", pairs, rows[at + num - 1]["step"])

    def _fall(self, of_what: str, pairs: list[tuple[int, float]], best_step: int) -> Drop:
        best, last = max(value for step, value in pairs if step == best_step), pairs[-1][1]
        half = (best + last) / 2
        later = (step for step, value in pairs if step > best_step and value <= half)
        return Drop(
            of_what=of_what,
            best=best,
            best_step=best_step,
            last=last,
            fell_step=next(later, pairs[-1][0]),
            is_collapse=best - last > (0.3 * best if self.is_judged else 0.6 * self._spread),
        )

    @property
    def _spread(self) -> float:
        """Standard deviation of a completion's score: of the rewards of a batch, or of right by half."""
        rewards = self.column("reward") or [0.0]
        return 0.5 if self.is_judged else _mean(self.column("reward_std")) or pstdev(rewards)

    def _noise(self, score: float, num_rows: int) -> float:
        """Standard error of a score over some rows, never 0 for a share: few prompts can't be sure of 0 or 1.

        Prompts count, not completions: those of a prompt are alike, the more so the longer a run is.
        """
        num = num_rows * max(1, self.completions_per_row // int(self.config.get("num_generations") or 8))
        if not self.is_judged:
            return self._spread / math.sqrt(num)
        share = (score * num + 1) / (num + 2)
        return math.sqrt(max(0.0, share * (1 - share)) / num)

    def standard_error(self, *evals: Mapping[str, Any]) -> float:
        """Of the difference of two evaluations, by their 95 % intervals."""
        low, high = f"{self.measure}_low", f"{self.measure}_high"
        return math.hypot(*((float(row[high]) - float(row[low])) / (2 * 1.96) for row in evals))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def percent(share: float) -> str:
    """`12.5 %`, `0 %`"""
    return f"{100 * share:.3g} %"
