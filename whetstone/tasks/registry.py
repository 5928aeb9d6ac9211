"""Task names -> tasks: the table `TASKS`, every task of reasoning-gym, and tasks of the user's own.

A label after a slash (`math/gsm8k`, `my_task.py:MyTask/hard`) separates entries of the same task.
"""

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from whetstone.config import Config, TaskSpec
from whetstone.config.plugins import is_plugin, load_object, users_code
from whetstone.environments.table import factory_of, is_named
from whetstone.errors import UserError, did_you_mean
from whetstone.tasks import gym, gym_levels, rows
from whetstone.tasks.base import Task
from whetstone.tasks.code import CodeTask
from whetstone.tasks.countdown import CountdownTask
from whetstone.tasks.environment import GAME_TASKS, environment_task
from whetstone.tasks.environment_rows import EnvironmentRowsTask
from whetstone.tasks.math import MathTask
from whetstone.tasks.own_rows import RowsTask
from whetstone.tasks.repair import RepairTask
from whetstone.types import Problem

TASKS: Mapping[str, type[Task]] = {
    "rows": RowsTask,
    "math": MathTask,
    "code": CodeTask,
    "countdown": CountdownTask,
    "repair": RepairTask,
    "environment": EnvironmentRowsTask,
    **GAME_TASKS,
}


@dataclass(frozen=True, kw_only=True)
class TaskInfo:
    """A line of `whet tasks`."""

    name: str
    category: str
    description: str
    levels: str  # of its curriculum; empty: it has none


def list_tasks() -> list[TaskInfo]:
    """Every built-in task, those of `TASKS` first."""
    described = [(name, "whetstone", kind.description) for name, kind in TASKS.items()]
    described += [
        (gym.PREFIX + name if name in TASKS else name, *gym.describe(name)) for name in gym.known_names()
    ]
    return [
        TaskInfo(name=name, category=category, description=text, levels=task_levels(name, {}))
        for name, category, text in described
    ]


def task_levels(name: str, settings: dict[str, Any]) -> str:
    """The levels of a reasoning-gym task's curriculum, described; empty where there are none."""
    if task_class(name) is not gym.GymTask:
        return ""
    return gym_levels.describe_levels(gym.gym_name(name), settings)


def settings_of(name: str) -> dict[str, Any]:
    """Setting -> default, for `whet tasks NAME`; empty for a task that is not known."""
    if name.split("/")[0] in TASKS or is_plugin(name):
        return dict(task_class(name).default_settings)
    return gym.default_settings(gym.gym_name(name))


def task_class(name: str) -> type[Task]:
    kind = name.split("/")[0]
    if kind in TASKS:
        return TASKS[kind]
    if is_named(spec := name if "://" in name else kind):  # an address has no label
        return _package_task(spec)
    if is_plugin(name):
        path = Path(name.rpartition(":")[0])
        return _load_class(name, str(path.resolve()), path.stat().st_mtime_ns if path.is_file() else 0)
    task, known = gym.gym_name(name), gym.known_names()
    if task == "composite":
        raise UserError("composite is reasoning-gym's own mixture: name its tasks and weights in `datasets`.")
    if task not in known:
        raise UserError(
            f"There is no task '{name}'{did_you_mean(name, [*known, *TASKS]) or '.'} `whet tasks` lists them "
            "all. A task of your own is my_task.py:MyTask."
        )
    return gym.GymTask


@cache
def _package_task(spec: str) -> type[Task]:
    return environment_task(spec, factory_of(spec), f"the environment {spec.partition(':')[2]}")


@cache
def _load_class(name: str, path: str, mtime: int) -> type[Task]:
    """Cached by file and time of change: each call would run the user's module again."""
    source, _, rest = name.rpartition(":")
    spec = f"{source}:{rest.split('/')[0]}"
    loaded = load_object(spec, "datasets")
    if hasattr(loaded, "reset"):
        return environment_task(spec, loaded, (loaded.__doc__ or "").strip().partition("\n")[0])
    if not (isinstance(loaded, type) and issubclass(loaded, Task)):
        raise UserError(
            f"datasets names '{spec}', which is no subclass of whetstone.tasks.base.Task and no environment: "
            f"write class {rest.split('/')[0]}(Task), or give it `reset` and `step`."
        )
    return loaded


def make_task(config: Config, name: str, spec: TaskSpec, split: str) -> Task:
    kind = task_class(name)
    if spec.curriculum is not None and not kind.has_curriculum:
        raise UserError(
            f"The task {name} has no curriculum, which only tasks of reasoning-gym have: leave `curriculum` "
            "out of its entry in datasets. `whet tasks` says at its end which tasks have one."
        )
    failed = f"The task {name} could not be constructed"
    with users_code(failed) if is_plugin(name) else contextlib.nullcontext():
        return kind(config, name, spec, split, _is_shared(config, spec, split))


def make_tasks(config: Config, split: str, *, isolated: bool | None = None) -> dict[str, Task]:
    """The tasks of one split without those of weight 0; `isolated`: only those scored in isolation."""
    specs = task_specs(config, split)
    if not specs:
        raise UserError("No task is given: set datasets (see `whet tasks`), data_path or train_dataset.")
    used = {name: spec for name, spec in specs.items() if spec.weight > 0}
    if not used:
        raise UserError(f"All tasks ({', '.join(specs)}) have weight 0: give at least one a positive weight.")
    return {
        name: make_task(config, name, spec, split)
        for name, spec in used.items()
        if isolated is None or task_class(name).isolated == isolated
    }


def evaluating_tasks(config: Config) -> list[str]:
    """The tasks whose scorers evaluate what the model wrote, so that they need isolation."""
    splits = [split for split in ("train", "eval") if task_specs(config, split)]
    tasks = {name: task for split in splits for name, task in make_tasks(config, split).items()}
    return [name for name, task in tasks.items() if task.evaluates_text]


def environments_of(config: Config) -> list[str]:
    """Names of the environments that the tasks of a configuration have."""
    specs = [entry for split in ("train", "eval") for entry in task_specs(config, split).items()]
    names = [environment for name, spec in specs for environment in task_class(name).environments(spec)]
    return list(dict.fromkeys(names))


def problem_rows(config: Config) -> Callable[[Problem], dict[str, Any]]:
    """What an agent is told of a problem: its messages, and what reward functions get by name."""

    @cache
    def tasks(split: str) -> dict[str, Task]:
        return make_tasks(config, split)

    def row(problem: Problem) -> dict[str, Any]:
        columns = tasks(problem.id.rsplit("/", 2)[1])[problem.task].columns(problem)
        fields = {"id": problem.id, "task": problem.task, "question": problem.question}
        whole = {**fields, "messages": list(problem.messages), **columns}
        return json.loads(json.dumps(whole, default=str))  # it goes to another process

    return row


def task_specs(config: Config, split: str) -> Mapping[str, TaskSpec]:
    """The entries of `datasets` or `eval_datasets` that a split uses."""
    assert split in ("train", "eval"), split
    return (config.tasks.eval_datasets or config.tasks.datasets) if split == "eval" else config.tasks.datasets


def _is_shared(config: Config, spec: TaskSpec, split: str) -> bool:
    """Whether the other split reads rows from the same source, so that each must keep to its side of it."""
    if config.evaluation.eval_num_samples == 0 or not (spec.config.get("path") or spec.config.get("dataset")):
        return False
    other = "train" if split == "eval" else "eval"
    others = [
        rows.source(entry.config, other) for entry in task_specs(config, other).values() if entry.weight > 0
    ]
    return rows.source(spec.config, split) in others


def with_room_for_turns(config: Config) -> Config:
    """For servers: where there are several turns, `max_prompt_length` bounds the first prompt alone, so a
    server takes what the model takes, unless `server_max_model_length` says otherwise.
    """
    own = config.environments
    if not (own.agent or own.rollout_func or own.tools or environments_of(config)):
        return config
    rollout = config.rollout.model_copy(update={"max_prompt_length": None})
    return config.model_copy(update={"rollout": rollout})
