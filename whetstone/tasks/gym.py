"""Every task of reasoning-gym by name: problems are pure functions of (seed, split, index).

Item i of a reasoning-gym data set with seed s is made from Random(s + i), so neighboring seeds share
problems: seeds are hashed. Finite data sets are chained in blocks. Some problems depend on the order of a set
of strings, and codeio runs code that writes files: a worker process with a fixed hash seed and its own folder
makes both. Some generators use the global random state: it is seeded, and restored afterwards.
"""

import atexit
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager, suppress
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

from whetstone.config import Config, TaskSpec
from whetstone.errors import UserError
from whetstone.rewards.answers import extract_tag
from whetstone.sandbox.evaluator import evaluate
from whetstone.sandbox.worker_process import WorkerProcess
from whetstone.seeds import seed
from whetstone.tasks.base import NO_THOUGHTS, Task, check_setting_names
from whetstone.tasks.gym_gold import gold_answer
from whetstone.tasks.gym_levels import check_levels, settings_at
from whetstone.tasks.gym_repairs import is_flawed, score_answer
from whetstone.types import Problem, TaskScore

PREFIX = "reasoning_gym/"
_BLOCK = 2_000  # problems of a bounded data set before the next one is made
# These raise IndexError from `size` on.
_BOUNDED = frozenset({"acre", "gsm_symbolic", "list_functions", "word_ladder"})
_IN_WORKER = frozenset(
    {"bf", "codeio", "isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note"}
    | {"word_ladder"}
)
# Scorers that hand the answer to `eval` or to sympy, which does (after a check of its form: `gym_forms.py`).
EVALUATED = frozenset(
    {"binary_matrix", "intermediate_integration", "n_queens", "polynomial_multiplication"}
    | {"simple_integration", "spiral_matrix", "string_insertion"}
)
_SYMBOLIC = frozenset({"intermediate_integration", "polynomial_multiplication", "simple_integration"})
_RETRY_STRIDE = 10_000_019
_RUN_SETTINGS = {"seed": "dataset_seed", "size": "dataset_size"}
_OTHER_NAMES = {"game_of_24": "puzzle24"}  # what people call a task -> reasoning-gym's name
_FIXED_SETTINGS = {("syllogism", "num_premises"): 2}  # settings that are written but could not be otherwise


class GymTask(Task):
    generated = True
    isolated = True
    scorer_modules = ("whetstone.tasks.gym_package",)
    has_curriculum = True

    level: int | None = None  # of its curriculum; None: `spec.config` as it is

    def __init__(self, config: Config, name: str, spec: TaskSpec, split: str, shared: bool = False) -> None:
        super().__init__(config, name, spec, split, shared)
        self._spec = spec
        self._levels: dict[int, GymTask] = {}
        self.task = gym_name(name)
        self.settings = check_settings(self.task, self.settings)
        self._seed = self.seed & 0x7FFF_FFFF
        # Made now, so that bad settings are found before anything is trained.
        self._dataset = _dataset(self.task, _CacheKey(self.settings), self._seed)
        if split == "train" and spec.curriculum is not None:
            levels = spec.curriculum
            self.max_level = check_levels(self.task, self.settings, levels.start, levels.top)

    def at_level(self, level: int) -> "GymTask":
        """The same task at a level of its curriculum: its problems are functions of (seed, index, level)."""
        if level not in self._levels:
            config = settings_at(self.task, level, self.settings)
            spec = self._spec.model_copy(update={"config": config, "curriculum": None})
            self._levels[level] = GymTask(self.config, self.name, spec, self.split)
            self._levels[level].level = level
        return self._levels[level]

    def problem(self, index: int) -> Problem:
        assert index >= 0
        make = _ask_worker if self.task in _IN_WORKER else make_entry
        entry = make(self.task, self.settings, self._seed, index)
        label = ""
        if self.level is not None:
            label, entry = f"@{self.level}", {**entry, "level": self.level}
        return self.make_problem(index, entry["question"], entry, label=label)

    def score(self, problem: Problem, text: str) -> TaskScore:
        level = problem.answer.get("level")
        if level != self.level:  # some scorers look at their own settings
            return self.at_level(level).score(problem, text)
        answer, entry = extract_tag(text), problem.answer
        if answer is None:
            value = 0.0
        elif self.task in _SYMBOLIC:  # slow, and it may hang
            value = evaluate(_score_in_fork, self.task, self.settings, self._seed, answer, entry)
        else:
            value = _score(self.task, self._dataset, answer, entry)
        return TaskScore(correct=value >= 1.0, reward=value, answer=answer)

    @property
    def evaluates_text(self) -> bool:
        return self.task in EVALUATED

    def warm_up(self) -> None:
        """Score a right and a wrong answer, so that the scorer has imported all that it needs."""
        with tempfile.TemporaryDirectory() as folder, chdir(folder):  # codeio runs code that writes files
            entry = make_entry(self.task, self.settings, self._seed, 0)
        for answer in (gold_answer(self.task, entry), "0"):
            with suppress(Exception):  # some scorers raise on text that is not of the form they expect
                self._dataset.score_answer(answer, entry)

    def gold(self, problem: Problem) -> str:
        return f"{NO_THOUGHTS}<answer>{gold_answer(self.task, problem.answer)}</answer>"

    def columns(self, problem: Problem) -> dict[str, Any]:
        return {"answer": problem.answer["answer"], "metadata": problem.answer["metadata"]}


def known_names() -> list[str]:
    """The tasks there are, without `composite`, reasoning-gym's own mixture: `datasets` is ours."""
    from whetstone.tasks.gym_package import DATASETS

    return sorted(name for name in DATASETS if name != "composite")


def gym_name(name: str) -> str:
    """`reasoning_gym/chain_sum`, `chain_sum` and `chain_sum/hard` are all chain_sum."""
    task = name.removeprefix(PREFIX).split("/")[0]
    return _OTHER_NAMES.get(task, task)


def describe(task: str) -> tuple[str, str]:
    """(category, one line) of a task."""
    from whetstone.tasks.gym_package import DATASETS

    dataset = DATASETS[task][0]
    doc = _DESCRIPTIONS.get(task) or (dataset.__doc__ or "").strip().split("\n")[0]
    doc = doc.split(" [here]")[0].split("[this scene")[0].strip().rstrip(".:")
    return dataset.__module__.split(".")[1], doc


def check_settings(task: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The task's settings (without those that are always so), or a complaint that names the wrong one."""
    known = default_settings(task)
    for key, value in settings.items():
        if value != _FIXED_SETTINGS.get((task, key), value):
            raise UserError(
                f"The task {task} has {key} {value}, but in reasoning-gym it is always "
                f"{_FIXED_SETTINGS[task, key]}: leave it out."
            )
        if key in _RUN_SETTINGS:
            raise UserError(f"The config of task {task} sets '{key}': set {_RUN_SETTINGS[key]} for the run.")
    check_setting_names([key for key in settings if (task, key) not in _FIXED_SETTINGS], list(known), task)
    return {key: value for key, value in settings.items() if key in known}


def default_settings(task: str) -> dict[str, Any]:
    """Setting -> default of a task of reasoning-gym; empty where there is no such task."""
    from whetstone.tasks.gym_package import DATASETS

    defaults = vars(DATASETS[task][1]()) if task in DATASETS else {}
    return {name: value for name, value in defaults.items() if name not in _RUN_SETTINGS}


def make_entry(task: str, settings: dict[str, Any], base: int, index: int) -> dict[str, Any]:
    """Entry `index`; another, far away, where the generator fails or the problem is flawed."""
    problem = "no problem with an answer of its own"
    for attempt in range(20):
        position = index + attempt * _RETRY_STRIDE
        block, offset = divmod(position, _BLOCK) if task in _BOUNDED else (0, position)
        block_seed = base if block == 0 else seed(base, "block", block) & 0x7FFF_FFFF
        dataset = _dataset(task, _CacheKey(settings), block_seed)
        dataset.size = _BLOCK  # word_ladder shortens itself on failure: later problems must not depend on it
        with _seeded(block_seed + offset):
            try:
                entry = dataset[offset]
                if not is_flawed(task, entry):
                    return entry
            except Exception as error:  # a generator of reasoning-gym that found nothing under this seed
                problem = f"{type(error).__name__}: {error}"
    raise UserError(f"The task {task} makes no problem with its settings ({problem}): change its config.")


def _score(task: str, dataset: Any, answer: str, entry: dict[str, Any]) -> float:
    """Some scorers raise on text that is not of the form they expect: that is a wrong answer."""
    try:
        return score_answer(task, dataset, answer, entry)
    except Exception:
        return 0.0


def _score_in_fork(
    task: str, settings: dict[str, Any], base: int, answer: str, entry: dict[str, Any]
) -> float:
    return _score(task, _dataset(task, _CacheKey(settings), base), answer, entry)


@contextmanager
def _seeded(value: int) -> Iterator[None]:
    """Global generators seeded for those who draw from them, and as they were afterwards."""
    import numpy as np

    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(value)
    np.random.seed(value % 2**32)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


class _CacheKey(dict[str, Any]):
    """Settings as a key of a cache, compared by their text."""

    def __hash__(self) -> int:
        return hash(repr(sorted(self.items())))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _CacheKey) and repr(sorted(other.items())) == repr(sorted(self.items()))


@lru_cache(maxsize=64)
def _dataset(task: str, settings: _CacheKey, base: int) -> Any:
    from whetstone.tasks.gym_package import create_dataset

    try:
        return create_dataset(task, seed=base, size=_BLOCK, **settings)
    except (AssertionError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        reason = str(error) or type(error).__name__
        raise UserError(f"The task {task} does not accept its config: {reason}.") from None


@lru_cache(maxsize=1)
def _worker() -> WorkerProcess:
    folder = tempfile.TemporaryDirectory(prefix="whetstone-")
    worker = WorkerProcess("whetstone.tasks.gym:serve_entries", folder.name)
    atexit.register(folder.cleanup)
    atexit.register(worker.close)
    return worker


def _ask_worker(task: str, settings: dict[str, Any], base: int, index: int) -> dict[str, Any]:
    worker = _worker()
    worker.connection.send((task, settings, base, index))
    try:
        entry = worker.connection.recv()
    except EOFError:
        _worker.cache_clear()
        code = worker.process.wait()
        raise RuntimeError(f"the process that makes problems of {task} ended with {code}") from None
    if isinstance(entry, UserError):
        raise entry
    return entry


def serve_entries(connection: Connection) -> None:
    """The worker's side of `_ask_worker`."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  codeio prints what it runs
    while True:
        task, settings, base, index = connection.recv()
        try:
            connection.send(make_entry(task, settings, base, index))
        except UserError as error:
            connection.send(error)


# Where reasoning-gym's own docstring is missing or another task's.
_DESCRIPTIONS = {
    "ab": "Rewrites a sequence of A and B tokens by four rules until none applies",
    "acre": "Infers from experiments whether a set of objects switches a light on",
    "arc_agi": "Puzzles of the ARC-AGI collection, with augmentation",
    "boxnet": "Plans moves of agents that carry boxes to targets on a grid",
    "calendar_arithmetic": "Computes with dates, weekdays and leap years",
    "circuit_logic": "Evaluates a digital logic circuit drawn in ASCII",
    "codeio": "Predicts the output, or the input, of a given piece of code",
    "cryptarithm": "Finds the digits behind the letters of an addition",
    "emoji_mystery": "Decodes a sentence hidden in an emoji's variation selectors",
    "game_of_life_halting": "Tells whether a Game of Life halts within given steps",
    "gsm_symbolic": "Grade-school word problems with changed names and numbers",
    "intermediate_integration": "Integrals by substitution or by parts",
    "list_functions": "Infers a rule on lists from examples and applies it",
    "number_format": "Picks the largest or smallest of differently written numbers",
    "puzzle24": "Makes 24 from four numbers (also by the name game_of_24)",
    "rearc": "ARC puzzles made by the procedural generators of RE-ARC",
    "string_manipulation": "Applies string rewriting rules until none applies or a state repeats",
    "survo": "Fills a grid so that rows and columns have given sums",
    "zebra_puzzles": "Who owns the zebra: logic puzzles of houses and their inhabitants",
}
