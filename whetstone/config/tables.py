"""Names of other projects: the tables config/projects/NAME.yml, whose README.md says what their parts are."""

import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

PROJECTS = ("trl", "unsloth", "axolotl", "verl", "prime-rl", "openrlhf")


def recipe_folders() -> list[Path]:
    """Where shipped recipes lie: inside the installed package, or beside it in a clone."""
    package = Path(__file__).resolve().parent.parent
    return [folder for folder in (package / "recipes", package.parent / "config") if folder.is_dir()]


def by_name(groups: Mapping[str, str]) -> dict[str, str]:
    """`{x: "a b"}` -> `{a: x, b: x}`."""
    return {name: value for value, names in groups.items() for name in names.split()}


@functools.cache
def table(name: str) -> dict[str, Any]:
    text = (recipe_folders()[0] / "projects" / f"{name}.yml").read_text(encoding="utf-8")
    content = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    content["without"] = by_name(content.get("without", {}))
    base = table("trl") if content.get("trl") and name != "trl" else {}
    merged = {part: base.get(part, {}) | content.get(part, {}) for part in ("names", "values", "without")}
    empty: dict[str, Any] = {part: {} for part in ("arithmetic", "needs", "defaults", "fixed")}
    return {"trl": False, "differs": (), **empty} | content | merged


def detect(keys: Collection[str]) -> str:
    """The project that one of the keys belongs to; TRL where none is marked."""
    marks = {project: tuple(table(project)["marker"]) for project in PROJECTS[1:]}
    return next((p for p, mark in marks.items() if any(key.startswith(mark) for key in keys)), "trl")


def is_moot(key: str, flat: Mapping[str, Any]) -> bool:
    """Whether a default decides nothing beside the other settings."""
    if key == "num_train_epochs":
        return (flat.get("max_steps") or -1) > 0
    if key in ("gae_lambda", "value_clip", "critic_learning_rate"):
        return flat.get("advantage") != "gae"
    if key in ("kl_in", "kl_estimator", "use_bias_correction_kl"):
        return not flat.get("beta")
    if key in ("lora_alpha", "lora_dropout"):
        return not flat.get("use_peft")
    if key in ("importance_correction_min", "importance_correction_max"):
        return flat.get("importance_correction", "none") == "none"
    if key in ("vllm_mode", "importance_correction"):
        return flat.get("rollout_engine") != "vllm"
    return key == "warmup_ratio" and bool(flat.get("warmup_steps"))
