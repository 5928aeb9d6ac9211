"""Several tasks as one sequence of problems, and the promise that training never sees an evaluation
problem.

Problem i of a mixture is a pure function of (seeds, i). Tasks take turns by weight, evenly and not in
random runs; every task goes through its own problems once, in an order of its own, before any comes round
again. Judges nothing: that is the tasks' part.
"""

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from whetstone.config import Config, TaskSpec
from whetstone.config.curriculum import CurriculumSpec
from whetstone.errors import UserError, did_you_mean
from whetstone.seeds import seed
from whetstone.tasks import gym, gym_levels, rows
from whetstone.tasks.base import Task
from whetstone.tasks.code import CodeTask
from whetstone.tasks.countdown import CountdownTask
from whetstone.tasks.math import MathTask
from whetstone.tasks.own_rows import RowsTask
from whetstone.types import Problem, Score

_STRIDE = 1_000_003  # how far away the stand-in for an evaluation problem is looked for
_TRIES = 200
_OURS = {
    "rows": "Your own rows: a prompt, and an answer or a reward function of your own (docs/data.md; "
    "path=FILE or dataset=HUB_NAME)",
    "math": "Questions with a final answer, from a JSON, JSONL, CSV or parquet file or a hub data set "
    "(path=FILE or dataset=HUB_NAME)",
    "code": "Programs that are run against tests, in Python, q, Klong, C, ... (config: {path: problems, "
    "language: python} for the set that ships)",
    "countdown": "Makes a target from given numbers, generated or from rows (reasoning-gym's own is "
    "reasoning_gym/countdown)",
}


@dataclass(frozen=True, kw_only=True)
class TaskInfo:
    """A line of `whet tasks`."""

    name: str
    category: str
    description: str
    levels: str  # of its curriculum; empty: it has none


def list_tasks() -> list[TaskInfo]:
    """Every task there is, ours first."""
    described = [(name, "whetstone", text) for name, text in _OURS.items()]
    described += [
        (gym.PREFIX + name if name in _OURS else name, *gym.describe(name)) for name in gym.known_names()
    ]
    return [
        TaskInfo(name=name, category=category, description=text, levels=task_levels(name, {}))
        for name, category, text in described
    ]


def task_levels(name: str, settings: dict[str, Any]) -> str:
    """The levels of a task's curriculum in words; empty where it has none."""
    ours = name.split("/")[0] in _OURS
    return "" if ours else gym_levels.describe_levels(gym.gym_name(name), settings)


def make_task(config: Config, name: str, spec: TaskSpec, split: str) -> Task:
    """The task that `name` means. A label after a slash (`math/gsm8k`) tells entries of the same kind
    apart.
    """
    kind = name.split("/")[0]
    if kind in _OURS and spec.curriculum is not None:
        raise UserError(
            f"The task {name} has no curriculum, which only tasks of reasoning-gym have: leave `curriculum` "
            "out of its entry in datasets. `whet tasks` says at its end which tasks have one."
        )
    if kind == "math":
        return MathTask(config, name, spec, split, _is_shared(config, spec, split))
    if kind == "rows":
        return RowsTask(config, name, spec, split, _is_shared(config, spec, split))
    if kind == "code":
        return CodeTask(config, name, spec, split, _is_shared(config, spec, split))
    if kind == "countdown":
        return CountdownTask(config, name, spec, split, _is_shared(config, spec, split))
    task = gym.gym_name(name)
    if task == "composite":
        raise UserError(
            "composite is reasoning-gym's own way to mix tasks: name those tasks and their weights in "
            "`datasets` instead."
        )
    known = gym.known_names()
    if task not in known:
        raise UserError(
            f"There is no task '{name}'{did_you_mean(name, [*known, *_OURS]) or '.'} "
            "`whet tasks` lists them all."
        )
    return gym.GymTask(config, name, spec, split)


def runs_programs(name: str) -> bool:
    """Whether answers to the task of this name are programs, which have a sandbox of their own."""
    return name.split("/")[0] == "code"


def evaluating_tasks(config: Config) -> list[str]:
    """The tasks whose scorers evaluate what the model wrote, so that they need isolation."""
    specs = {
        name: spec
        for split in ("train", "eval")
        for name, spec in _specs(config, split).items()
        if spec.weight > 0
    }
    return [name for name, spec in specs.items() if _evaluates(name, spec)]


def _evaluates(name: str, spec: TaskSpec) -> bool:
    kind = name.split("/")[0]
    if kind in _OURS:  # symbolic comparison is sympy's
        return kind == "math" or (kind == "rows" and spec.config.get("match", "math") == "math")
    return gym.gym_name(name) in gym.EVALUATED


def make_tasks(config: Config, split: str) -> dict[str, Task]:
    """The tasks of one split by name, those of weight 0 left out. Reads no rows and makes no problems."""
    specs = _specs(config, split)
    if not specs:
        raise UserError(
            "No task is given: set datasets, such as datasets={chain_sum: {weight: 1.0}}; `whet tasks` lists "
            "them all."
        )
    used = {name: spec for name, spec in specs.items() if spec.weight > 0}
    if not used:
        raise UserError(f"All tasks ({', '.join(specs)}) have weight 0: give at least one a positive weight.")
    return {name: make_task(config, name, spec, split) for name, spec in used.items()}


def _specs(config: Config, split: str) -> Mapping[str, TaskSpec]:
    assert split in ("train", "eval"), split
    return (config.tasks.eval_datasets or config.tasks.datasets) if split == "eval" else config.tasks.datasets


def _is_shared(config: Config, spec: TaskSpec, split: str) -> bool:
    """Whether the other split draws rows from the same source, so that each must keep to its side of it."""
    if config.evaluation.eval_num_samples == 0 or not (spec.config.get("path") or spec.config.get("dataset")):
        return False
    other = "train" if split == "eval" else "eval"
    others = [
        rows.source(entry.config, other) for entry in _specs(config, other).values() if entry.weight > 0
    ]
    return rows.source(spec.config, split) in others


class Mixture:
    """The problems of several tasks in one endless sequence; `len` of them make an epoch."""

    def __init__(self, config: Config, split: str, avoid: Iterable[Problem] = ()) -> None:
        """`avoid`: problems whose questions must not occur."""
        self.split = split
        self.tasks = make_tasks(config, split)
        self._avoid = frozenset(problem.question for problem in avoid)
        self._seed = config.tasks.eval_dataset_seed if split == "eval" else config.tasks.dataset_seed
        specs = _specs(config, split)
        self._names = list(self.tasks)
        weights = [Fraction(str(specs[name].weight)) for name in self._names]
        # Rows that are evaluation problems are taken out; generated ones are replaced when they turn up.
        self._rows = {
            name: self._allowed_rows(task) for name, task in self.tasks.items() if not task.generated
        }
        self._length = _epoch_length(
            weights,
            [len(self._rows[n]) if n in self._rows else None for n in self._names],
            config.tasks.dataset_size,
        )
        counts = apportion(self._length, weights)
        self._turns = take_turns(counts)
        self._counts = dict(zip(self._names, counts, strict=True))
        self.ladders: dict[str, tuple[CurriculumSpec, int]] = {
            name: (spec, task.top)
            for name, task in self.tasks.items()
            if isinstance(task, gym.GymTask) and task.top is not None and (spec := specs[name].curriculum)
        }

    def __len__(self) -> int:
        return self._length

    def problem(self, index: int, levels: Mapping[str, int] | None = None) -> Problem:
        """Problem `index` of the endless sequence; `levels` of those tasks that have a curriculum, where they
        begin if not given.
        """
        epoch, position = divmod(index, self._length)
        which, turn = (int(value) for value in self._turns[position])
        name = self._names[which]
        turn += epoch * self._counts[name]
        size = len(self._rows[name]) if name in self._rows else self._counts[name]
        through, place = divmod(turn, size)
        place = _shuffled(size, seed(self._seed, "order", self.split, name, through))[place]
        if name in self._rows:
            return self.tasks[name].problem(self._rows[name][place])
        task = self.tasks[name]
        if name in self.ladders:
            assert isinstance(task, gym.GymTask)
            task = task.at(self.ladders[name][0].start if levels is None else levels[name])
        return self._stand_in(task, place)

    def score(self, problem: Problem, text: str) -> Score:
        """The judgement of the problem's own task, in this process."""
        return self.tasks[problem.task].score(problem, text)

    def _allowed_rows(self, task: Task) -> list[int]:
        allowed = [
            i for i in range(len(task)) if not self._avoid or task.problem(i).question not in self._avoid
        ]
        if not allowed:
            raise UserError(
                f"Every row of task {task.name} is an evaluation problem too: train on other rows or set "
                "eval_path."
            )
        return allowed

    def _stand_in(self, task: Task, index: int) -> Problem:
        for attempt in range(_TRIES):
            problem = task.problem(index + attempt * _STRIDE)
            if problem.question not in self._avoid:
                return problem
        raise UserError(
            f"The task {task.name} has too few different problems beside the evaluation set: {_TRIES} tries "
            "all gave an evaluation problem. "
            "Widen its config or lower eval_num_samples."
        )


def build_tasks(config: Config, split: str, eval_set: Iterable[Problem] | None = None) -> Mixture:
    """The mixture of a split. "train" keeps out the questions of `eval_set` (made anew if not given)."""
    if split == "eval":
        return Mixture(config, "eval")
    return Mixture(config, "train", eval_problems(config) if eval_set is None else eval_set)


def eval_problems(config: Config) -> list[Problem]:
    """The fixed evaluation problems: `eval_num_samples`, spread over the tasks by weight, different ones as
    far as there are.
    """
    total = config.evaluation.eval_num_samples
    if total == 0:
        return []
    mixture = build_tasks(config, "eval")
    specs = _specs(config, "eval")
    counts = apportion(total, [Fraction(str(specs[name].weight)) for name in mixture.tasks])
    chosen = [
        _different(task, count, mixture._seed)
        for task, count in zip(mixture.tasks.values(), counts, strict=True)
    ]
    turns = take_turns([len(problems) for problems in chosen])
    return [chosen[int(which)][int(turn)] for which, turn in turns]


def _different(task: Task, count: int, base: int) -> list[Problem]:
    """`count` problems of a task without repetition; a generated task that has too few repeats them, rows
    are only so many.
    """
    found: dict[str, Problem] = {}
    if task.generated:
        spare: list[Problem] = []
        for index in range(10 * count + 50):
            if len(found) >= count:
                break
            problem = task.problem(index)
            if found.setdefault(problem.question, problem) is not problem:
                spare.append(problem)
        return [*found.values(), *spare][:count]
    for index in _shuffled(len(task), seed(base, "evaluation", task.name)):
        if len(found) >= count:
            break
        problem = task.problem(index)
        found.setdefault(problem.question, problem)
    return list(found.values())


def sandbox_notes(mixture: Mixture) -> list[str]:
    """What protects this machine from the programs of code tasks, each sentence once."""
    said = [task.prepare() for task in mixture.tasks.values() if isinstance(task, CodeTask)]
    return list(dict.fromkeys(sentence for sentence in said if sentence))


def describe_data(tasks: Iterable[Task]) -> list[str]:
    """What is read from rows of the user's own, and how it is compared and paid."""
    return [task.describe() for task in tasks if isinstance(task, RowsTask)]


def check_gold(mixture: Mixture, per_task: int = 3) -> None:
    """Every task scores the gold answers of a few of its own problems; one that rejects them cannot be
    trained on.
    """
    tasks = list(mixture.tasks.values())
    for name, (ladder, _) in mixture.ladders.items():
        task = mixture.tasks[name]
        assert isinstance(task, gym.GymTask)
        tasks.append(task.at(ladder.start))
    for task in tasks:
        for index in range(min(per_task, len(task))):
            problem = task.problem(index)
            gold = task.gold(problem)
            if gold is None:
                continue
            score = task.score(problem, gold)
            if score.parts.get("correct") != 1.0:
                raise UserError(
                    f"The task {task.name} rejects its own gold answer of {problem.id} ({score.answer!r}), "
                    "so no model could be right on it: "
                    "check its config or its data."
                )


def apportion(total: int, weights: list[Fraction]) -> list[int]:
    """`total` in whole parts proportional to the weights (largest remainders; ties to the first)."""
    exact = [total * weight / sum(weights) for weight in weights]
    parts = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: parts[i] - exact[i])
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts


def take_turns(counts: list[int]) -> np.ndarray:
    """[sum(counts), 2]: (which, its how-manieth) in an order in which every prefix holds each about in
    proportion.
    """
    which = np.repeat(np.arange(len(counts)), counts)
    turn = np.concatenate([np.arange(count) for count in counts]) if counts else np.arange(0)
    when = (
        np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in counts])
        if counts
        else np.arange(0.0)
    )
    order = np.lexsort((which, when))
    return np.stack([which[order], turn[order]], axis=1).astype(np.int64)


def _epoch_length(weights: list[Fraction], sizes: list[int | None], dataset_size: int) -> int:
    """Problems in an epoch: enough that every row occurs, or the configured size where all tasks are
    generated.
    """
    needed = [
        math.ceil(size * sum(weights) / weight)
        for size, weight in zip(sizes, weights, strict=True)
        if size is not None
    ]
    return max(needed, default=dataset_size)


@lru_cache(maxsize=64)
def _shuffled(size: int, order_seed: int) -> Any:
    order = np.arange(size)
    random.Random(order_seed).shuffle(order)  # type: ignore[arg-type]
    return order.tolist()
