"""Curriculum: a difficulty level per task that rises with accuracy, and falls where configured."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from whetstone.config.tasks import CurriculumSpec
from whetstone.types import Group


class Curriculum:
    def __init__(self, curricula: Mapping[str, tuple[CurriculumSpec, int]]):
        """`curricula`: for each task that has one, its settings and its highest level."""
        self._curricula = dict(curricula)
        self.levels = {task: spec.start for task, (spec, _) in curricula.items()}
        self._answers: dict[str, list[bool]] = {task: [] for task in curricula}  # at this level, right or not

    def observe(self, groups: Iterable[Group]) -> None:
        """Take a batch's answers into account; a level moves by one at most."""
        for group in groups:
            task = group.problem.task
            if task in self._curricula:
                self._answers[task] += [r.score.parts.get("correct", 0.0) >= 1 for r in group.rollouts]
        for task, (spec, top) in self._curricula.items():
            newest = self._answers[task] = self._answers[task][-spec.window :]
            accuracy = sum(newest) / spec.window if len(newest) == spec.window else math.nan
            if accuracy >= spec.up and self.levels[task] < top:
                self.levels[task] += 1
            elif spec.down is not None and accuracy <= spec.down and self.levels[task] > 0:
                self.levels[task] -= 1
            else:
                continue
            self._answers[task] = []

    def metrics(self) -> dict[str, float]:
        return {f"curriculum/{task}/level": float(level) for task, level in self.levels.items()}

    def state(self) -> dict[str, Any]:
        return {
            task: {"level": self.levels[task], "answers": self._answers[task]} for task in self._curricula
        }

    def load_state(self, state: dict[str, Any]) -> None:
        for task, saved in state.items():
            if task in self._curricula:  # a resumed run may have other datasets
                self.levels[task], self._answers[task] = saved["level"], list(saved["answers"])
