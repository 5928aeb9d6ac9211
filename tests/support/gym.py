"""reasoning-gym tasks with small settings."""

from whetstone.config import TaskSpec, build
from whetstone.tasks.gym import GymTask

# Default settings whose problems take seconds each are made smaller here.
SMALLER = {"knight_swap": {"max_nodes": 6, "max_attempts": 5}, "futoshiki": {"max_board_size": 5}}


def task(name: str, split: str = "train", settings: dict | None = None, **keys) -> GymTask:
    config = build({"datasets": {name: {"config": settings or {}}}, **keys})
    return GymTask(config, name, TaskSpec(weight=1.0, config=settings or {}), split)
