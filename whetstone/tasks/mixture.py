"""Several tasks as one sequence of problems, in which training never sees an evaluation problem.

Problem i of a mixture is a pure function of (seeds, i). Tasks are interleaved in proportion to their weights,
not in random runs. Every task goes through its own problems once, in its own order, before any is repeated.
"""

import logging
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from whetstone.config.sections import Config
from whetstone.config.tasks import CurriculumSpec
from whetstone.errors import UserError
from whetstone.seeds import seed
from whetstone.tasks.base import Task
from whetstone.tasks.registry import make_tasks, task_specs
from whetstone.types import Problem

Fits = Callable[[Problem], bool]  # whether a prompt is short enough
logger = logging.getLogger("whetstone")
_STRIDE = 1_000_003  # between an evaluation problem and its replacement
_TRIES = 200


class Mixture:
    """The problems of several tasks in one endless sequence; `len` of them make an epoch."""

    def __init__(
        self, config: Config, split: str, avoid: Iterable[Problem] = (), fits: Fits | None = None
    ) -> None:
        """`avoid`: problems whose questions must not occur; `fits`: which rows may."""
        self.split = split
        self.tasks = make_tasks(config, split)
        self._avoid = frozenset(problem.identity for problem in avoid)
        self._seed = config.tasks.eval_dataset_seed if split == "eval" else config.tasks.dataset_seed
        specs = task_specs(config, split)
        self._names = list(self.tasks)
        weights = [Fraction(str(specs[name].weight)) for name in self._names]
        # Rows that are evaluation problems are taken out; generated ones are replaced when they turn up.
        self._rows = {
            name: self._allowed_rows(task, fits) for name, task in self.tasks.items() if not task.generated
        }
        # An epoch has every row; with generated tasks alone, the configured size.
        by_name = zip(self._names, weights, strict=True)
        needed = [math.ceil(len(self._rows[n]) * sum(weights) / w) for n, w in by_name if n in self._rows]
        self._length = max(needed, default=config.tasks.dataset_size)
        counts = apportion(self._length, weights)
        self._turns = interleave(counts)
        self._counts = dict(zip(self._names, counts, strict=True))
        self.curricula: dict[str, tuple[CurriculumSpec, int]] = {
            name: (spec, task.max_level)
            for name, task in self.tasks.items()
            if task.max_level is not None and (spec := specs[name].curriculum)
        }

    def __len__(self) -> int:
        return self._length

    def problem(self, index: int, levels: Mapping[str, int] | None = None) -> Problem:
        """Problem `index`; `levels` of the tasks with a curriculum, by default where each starts."""
        epoch, position = divmod(index, self._length)
        task_index, turn = (int(value) for value in self._turns[position])
        name = self._names[task_index]
        turn += epoch * self._counts[name]
        size = len(self._rows[name]) if name in self._rows else self._counts[name]
        pass_number, offset = divmod(turn, size)
        item = _shuffled(size, seed(self._seed, "order", self.split, name, pass_number))[offset]
        if name in self._rows:
            return self.tasks[name].problem(self._rows[name][item])
        task = self.tasks[name]
        if name in self.curricula:
            task = task.at_level(self.curricula[name][0].start if levels is None else levels[name])
        return self._replacement(task, item)

    def _allowed_rows(self, task: Task, fits: Fits | None) -> list[int]:
        rows = range(len(task))
        allowed = [i for i in rows if not self._avoid or task.problem(i).identity not in self._avoid]
        if (both := len(rows) - len(allowed)) > 0:
            logger.info(f"{task.name}: {both:,} of {len(rows):,} rows are evaluation problems too: left out.")
        fitting = [i for i in allowed if fits is None or fits(task.problem(i))]
        if len(fitting) < len(allowed):
            part = f"{len(allowed) - len(fitting):,} of {len(allowed):,} prompts"
            logger.info(f"{task.name} ({self.split}): {part} longer than max_prompt_length are left out.")
        if not fitting:
            remedy = "raise max_prompt_length" if allowed else "set eval_path"
            reason = "too long" if allowed else "an evaluation problem too"
            raise UserError(f"Every row of task {task.name} is {reason}: {remedy}.")
        return fitting

    def _replacement(self, task: Task, index: int) -> Problem:
        for attempt in range(_TRIES):
            problem = task.problem(index + attempt * _STRIDE)
            if problem.identity not in self._avoid:
                return problem
        raise UserError(
            f"The task {task.name} has too few different problems beside the evaluation set: {_TRIES} tries "
            "all gave an evaluation problem. Widen its config or lower eval_num_samples."
        )


def build_tasks(
    config: Config, split: str, eval_set: Iterable[Problem] | None = None, fits: Fits | None = None
) -> Mixture:
    """The mixture of a split. "train" keeps out the questions of `eval_set` (made anew if not given)."""
    if split == "eval":
        return Mixture(config, "eval", fits=fits)
    return Mixture(config, "train", eval_problems(config, fits) if eval_set is None else eval_set, fits)


def eval_problems(config: Config, fits: Fits | None = None) -> list[Problem]:
    """`eval_num_samples` fixed problems, spread over the tasks by weight; fewer where a task has no more."""
    total = config.evaluation.eval_num_samples
    if total == 0:
        return []
    mixture = build_tasks(config, "eval", fits=fits)
    own = [task for task in mixture.tasks.values() if not task.shared or config.evaluation.eval_only]
    for note in (note for task in own for note in task.notes()[:1]):  # otherwise training says it
        logger.info(note)
    specs = task_specs(config, "eval")
    counts = apportion(total, [Fraction(str(specs[name].weight)) for name in mixture.tasks])
    pairs = zip(mixture.tasks.values(), counts, strict=True)
    per_task = [_distinct(task, count, mixture._seed, mixture._rows.get(task.name)) for task, count in pairs]
    turns = interleave([len(problems) for problems in per_task])
    return [per_task[int(task_index)][int(turn)] for task_index, turn in turns]


def _distinct(task: Task, count: int, base: int, rows: Sequence[int] | None) -> list[Problem]:
    """`count` problems of a task, or all that it has: a repetition would count as another problem."""
    distinct: dict[str, Problem] = {}
    shuffle_seed = seed(base, "evaluation", task.name)
    for index in range(10 * count + 50) if rows is None else _shuffled(len(rows), shuffle_seed):
        if len(distinct) >= count:
            break
        problem = task.problem(index if rows is None else rows[index])
        distinct.setdefault(problem.identity, problem)
    return list(distinct.values())


def prepare_tasks(mixture: Mixture) -> list[str]:
    """Prepare every task for training; what they report (the isolation of programs), each sentence once."""
    reports = [task.prepare() for task in mixture.tasks.values()]
    return list(dict.fromkeys(report for report in reports if report))


def check_gold(mixture: Mixture, per_task: int = 3) -> None:
    """Raise where a task rejects the gold answers of its own first problems: nobody could be right on it."""
    starts = [mixture.tasks[name].at_level(spec.start) for name, (spec, _) in mixture.curricula.items()]
    for task in (*mixture.tasks.values(), *starts):
        for problem in map(task.problem, range(min(per_task, len(task)))):
            gold = task.gold(problem)
            score = None if gold is None else task.score(problem, gold)
            if score is not None and score.parts.get("correct") != 1.0:
                raise UserError(
                    f"The task {task.name} rejects its own gold answer of {problem.id} ({score.answer!r}), "
                    "so no model could be right on it: check its config or its data."
                )


def apportion(total: int, weights: list[Fraction]) -> list[int]:
    """`total` in whole parts proportional to the weights (largest remainders; ties to the first)."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [math.floor(exact_count) for exact_count in exact]
    by_remainder = sorted(range(len(counts)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def interleave(counts: list[int]) -> np.ndarray:
    """[sum(counts), 2]: (which, its number), ordered so that every prefix is about in proportion."""
    task_index = np.repeat(np.arange(len(counts)), counts)
    turn = np.concatenate([np.arange(count) for count in counts])
    order_key = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in counts])
    order = np.lexsort((task_index, order_key))
    return np.stack([task_index[order], turn[order]], axis=1).astype(np.int64)


@lru_cache(maxsize=64)
def _shuffled(size: int, order_seed: int) -> Any:
    order = np.arange(size)
    random.Random(order_seed).shuffle(order)  # type: ignore[arg-type]
    return order.tolist()
