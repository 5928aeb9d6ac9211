"""The best constant answer of each reasoning-gym task, by a table of `scripts/measure_constants.py`."""

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import Any

from whetstone.config import TaskSpec
from whetstone.tasks.gym import gym_name

TABLE = "gym_constants.json"


def best_constant(task: str) -> tuple[str, float] | None:
    """The answer right on most problems with default settings, and that share; None where not measured."""
    row = measured()["tasks"].get(gym_name(task))
    return None if row is None or row["answer"] is None else (row["answer"], row["rate"])


def constant_rates(specs: Mapping[str, TaskSpec]) -> dict[str, float]:
    """What the best constant answer earns, for the tasks where that is known: those with default settings."""
    names = [name for name, spec in specs.items() if not spec.config]
    return {name: best[1] for name in names if (best := best_constant(name)) is not None}


def describe_constant(task: str) -> str:
    """`'Yes', right on 71 %`; empty where there is nothing to say."""
    best = best_constant(task)
    return "" if best is None else f"{shorten(best[0])!r}, right on {best[1]:.0%}".replace("%", " %")


def shorten(answer: str, longest: int = 60) -> str:
    return answer if len(answer) <= longest else answer[: longest - 3] + "..."


@lru_cache(maxsize=1)
def measured() -> dict[str, Any]:
    """The whole table: versions, and `answer`, `rate` and `problems` by task."""
    return json.loads(resources.files("whetstone.tasks").joinpath(TABLE).read_text(encoding="utf-8"))
