"""A flat YAML file and `key=value` arguments -> a `Config`, with a note of where each value came from."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from whetstone.config import accelerate
from whetstone.config.base import Resume, key_descriptions
from whetstone.config.overrides import ARGUMENT, COMMAND_LINE, parse_overrides
from whetstone.config.sections import Config
from whetstone.config.tables import is_moot, recipe_folders, table
from whetstone.config.translate import OTHER_NAMES, Translation
from whetstone.config.trl_names import ONLY_TRL
from whetstone.config.yaml_text import check_text, check_values, read_yaml, shorten
from whetstone.errors import UserError, did_you_mean

SECTION_FIELDS: dict[str, Any] = {name: field.annotation for name, field in Config.model_fields.items()}
SECTION_OF = {key: section for section, model in SECTION_FIELDS.items() for key in model.model_fields}
# Configurations of accelerate that lie beside the recipes, for its command line.
NOT_RECIPES = ("zero3.yaml",)


@dataclass(frozen=True, kw_only=True)
class LoadedConfig:
    """A configuration, where each key's value came from, and what was understood under another name."""

    config: Config
    origins: dict[str, str]  # key -> "grpo.yaml", "argument"; keys at their default are absent
    notes: tuple[str, ...]


def load(source: str | os.PathLike[str] | None = None, overrides: Iterable[str] = ()) -> LoadedConfig:
    """Read `source` (a path or the name of a shipped recipe; None: defaults only) and apply `overrides`."""
    translation = Translation(SECTION_OF)
    requested = accelerate.requests(os.environ)
    for request in requested:
        translation.add(request.origin, {k: v for k, v in request.keys.items() if k != "bf16"})
    if source is not None:
        path = find(source)
        written = read_yaml(path)
        translation.add(path.name, written)
    origin = ARGUMENT if isinstance(overrides, dict) else COMMAND_LINE
    values = overrides if isinstance(overrides, dict) else parse_overrides(overrides)
    check_values(values, origin)
    translation.add(origin, values)
    translation.finish()
    for request in requested:  # bf16 last: names such as dtype act only where it is not set
        if request.keys.keys() - translation.flat.keys():
            translation.add(request.origin, request.keys)
    translation.notes += accelerate.notes(requested, translation.flat, translation.origins)
    if source is not None and not {"run_name", "output_dir"} & set(translation.flat):
        translation.flat["run_name"] = path.stem  # a folder for each file; with output_dir TRL's meaning
        _check_resume(translation.flat, Path("outputs"))
    config = build(translation.flat)
    if source is not None and not ONLY_TRL.isdisjoint(written):
        ours, flat = flatten(config), translation.flat
        theirs = {k: v for k, v in table("trl")["fixed"].items() if k not in flat and not is_moot(k, flat)}
        shown = ", ".join(f"{key} {value} (here {ours[key]})" for key, value in theirs.items())
        translation.notes += [f"{path.name} leaves out what TRL sets otherwise: {shown}."] if shown else []
    return LoadedConfig(config=config, origins=translation.origins, notes=tuple(translation.notes))


def _check_resume(flat: dict[str, Any], parent: Path) -> None:
    """A run from before files had folders of their own is in `parent`: `auto_resume` would not find it."""
    name = flat["run_name"]
    if flat.get("auto_resume") and not (parent / name).exists() and any(parent.glob("checkpoint-*")):
        raise UserError(
            f"There is a run in {parent}, but that of this file would be in {parent / name}: set "
            f"output_dir={parent} to resume the one that is there, or run_name={name} for a new one."
        )


def build(flat: dict[str, Any]) -> Config:
    """A `Config` from flat keys under our own names."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        sections.setdefault(SECTION_OF[key], {})[key] = value
    try:
        return Config(**sections)  # type: ignore[arg-type]
    except ValidationError as error:
        raise UserError(_sentence(error)) from None


def flatten(config: Config) -> dict[str, Any]:
    """The flat form of a configuration, in the order of the sections."""
    return {key: value for section in config.model_dump().values() for key, value in section.items()}


def dump(config: Config) -> str:
    """The flat YAML of a configuration: loading it gives the same configuration."""
    return yaml.safe_dump(flatten(config), sort_keys=False, allow_unicode=True, width=110)


def find(source: str | os.PathLike[str]) -> Path:
    """The file that `source` means: a path, or the name of a recipe that ships with the package."""
    check_text(str(source), "The name of the configuration")
    path, shown = Path(source), shorten(str(source))
    try:
        if path.is_file():
            return path
        for folder in recipe_folders():
            for candidate in (folder / path, folder / f"{path}.yaml", folder / path.name):
                if candidate.is_file():
                    return candidate
    except OSError as error:
        raise UserError(f"'{shown}' can't be read ({error.strerror}).") from None
    if path.is_dir():
        raise UserError(f"'{shown}' is a folder: give a YAML file inside it.")
    hint = did_you_mean(str(source), recipe_names()) or (
        f": give the path of a YAML file, or one of the recipes {', '.join(recipe_names())}."
    )
    raise UserError(f"There is no configuration file '{shown}'{hint}")


def recipe_names() -> list[str]:
    """Every shipped recipe, as `whet train NAME` takes it."""
    paths = {path.relative_to(folder) for folder in recipe_folders() for path in folder.rglob("*.yaml")}
    return sorted(path.with_suffix("").as_posix() for path in paths if path.name not in NOT_RECIPES)


def resume_keys(rule: Resume) -> frozenset[str]:
    """The keys that a resumed run treats by `rule`."""
    return frozenset(
        key
        for section in SECTION_FIELDS.values()
        for key, field in section.model_fields.items()
        if next((entry for entry in field.metadata if isinstance(entry, Resume)), section.resume) is rule
    )


def is_known_key(key: str) -> bool:
    """Whether a key is ours, or a name of another trainer that is accepted."""
    return key in SECTION_OF or key in OTHER_NAMES


def _sentence(error: ValidationError) -> str:
    """The first complaint of pydantic as a sentence that names the flat key."""
    first = error.errors(include_url=False)[0]
    where = [str(part) for part in first["loc"][1:]]  # without the section
    if where and where[0] not in ("datasets", "eval_datasets"):
        where = where[:1] + [part for part in where[1:] if part.isdecimal()]  # no names of types
    message = first["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:] if not message[:2].isupper() else message
    if not where:
        return f"{message}."
    name = shorten(".".join(where))
    if first["type"] == "extra_forbidden":
        return (
            f"'{shorten(where[-1])}' is not known inside {shorten('.'.join(where[:-1]))}: a task has "
            "`weight`, `config` and `curriculum` (start, top, up, down, window)."
        )
    shown = repr(first.get("input"))
    got = "" if first["type"] == "value_error" or len(shown) > 80 else f" (it is {shown})"
    section = SECTION_OF.get(where[0])
    text = key_descriptions(SECTION_FIELDS[section]).get(where[0], "") if section else ""
    meaning = f" Its meaning: {' '.join(text.split())}" if text else ""
    return f"{name}: {message}{got}.{meaning}"
