"""A flat YAML file and `key=value` words -> a `Config`, with a note of where each value came from.

Refuses what it does not know, with the nearest name it does. Does no arithmetic (`plan.py`) and loads no
model or data.
"""

import difflib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from whetstone.config.names import CONVERTED, RENAMED, SECTIONS, VALUES, WITHOUT_EFFECT
from whetstone.config.rooms import Config
from whetstone.config.weights import keep_weights
from whetstone.errors import UserError

ROOM_FIELDS: dict[str, Any] = {name: field.annotation for name, field in Config.model_fields.items()}
ROOM_OF = {key: room for room, model in ROOM_FIELDS.items() for key in model.model_fields}


COMMAND_LINE = "command line"


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A configuration, where each key's value came from, and what was understood under another name."""

    config: Config
    origins: dict[str, str]  # key -> "grpo.yaml", "command line"; keys at their default are absent
    notes: tuple[str, ...]


class _Loader(yaml.SafeLoader):
    """YAML that reads 1e-6 as a number, as everybody expects (YAML 1.1 wants 1.0e-6)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    __import__("re").compile(r"^[-+]?(\d[\d_]*)?\.?\d[\d_]*[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def load(source: str | os.PathLike[str] | None = None, overrides: Iterable[str] = ()) -> Loaded:
    """Read `source` (a path or the name of a shipped recipe; None: defaults only) and apply `overrides`."""
    layers: list[tuple[str, dict[str, Any]]] = []
    if source is not None:
        path = find(source)
        layers.append((path.name, read_yaml(path)))
    layers.append((COMMAND_LINE, parse_overrides(overrides)))
    flat: dict[str, Any] = {}
    written: dict[str, Any] = {}  # under the names that were used
    origins: dict[str, str] = {}
    notes: list[str] = []
    for origin, values in layers:
        values = _out_of_sections(values, origin, notes)
        if origin != COMMAND_LINE:  # there the last word wins
            _refuse_two_names(values, origin)
        written.update(values)
        ours = _understand(values, {**written, **flat}, origin, notes)
        if ours.get("use_vllm") is True and "rollout_engine" not in ours:
            flat.pop("rollout_engine", None)  # what is said later wins
            origins.pop("rollout_engine", None)
        keep_weights(flat, ours, origin, notes)
        flat.update(ours)
        origins.update(dict.fromkeys(ours, origin))
    _remark(flat, origins, notes)
    return Loaded(config=build(flat), origins=origins, notes=tuple(notes))


def build(flat: dict[str, Any]) -> Config:
    """A `Config` from flat keys under our own names."""
    rooms: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        rooms.setdefault(ROOM_OF[key], {})[key] = value
    try:
        return Config(**rooms)  # type: ignore[arg-type]
    except ValidationError as error:
        raise UserError(_sentence(error)) from None


def flatten(config: Config) -> dict[str, Any]:
    """The flat form of a configuration, in the order of the rooms."""
    return {key: value for room in config.model_dump().values() for key, value in room.items()}


def dump(config: Config) -> str:
    """The flat YAML of a configuration: loading it gives the same configuration."""
    return yaml.safe_dump(flatten(config), sort_keys=False, allow_unicode=True, width=110)


def find(source: str | os.PathLike[str]) -> Path:
    """The file that `source` means: a path, or the name of a recipe that ships with the package."""
    given = Path(source)
    if given.is_file():
        return given
    for folder in recipe_folders():
        for candidate in (folder / given, folder / f"{given}.yaml", folder / given.name):
            if candidate.is_file():
                return candidate
    shipped = ", ".join(
        sorted(
            {
                path.relative_to(folder).with_suffix("").as_posix()
                for folder in recipe_folders()
                for path in folder.rglob("*.yaml")
            }
        )
    )
    raise UserError(
        f"There is no configuration file '{source}': give the path of a YAML file, or one of the recipes "
        f"{shipped}."
    )


def recipe_folders() -> list[Path]:
    """Where shipped recipes lie: inside the installed package, or beside it in a clone."""
    package = Path(__file__).resolve().parent.parent
    return [folder for folder in (package / "recipes", package.parent / "config") if folder.is_dir()]


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except yaml.YAMLError as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        where = f" near line {mark.line + 1}" if mark else ""
        raise UserError(f"{path} is not readable as YAML{where}: check its indentation and quotes.") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text file: give a YAML file.") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UserError(
            f"{path} holds a {type(data).__name__}, not keys and values: write lines such as 'max_steps: "
            "100'."
        )
    return {str(key): value for key, value in data.items()}


def parse_overrides(words: Iterable[str]) -> dict[str, Any]:
    """`key=value`, `--key=value`, `--key value` and a bare `--switch` (true) -> flat keys; values are read as
    YAML.
    """
    words = list(words)
    values: dict[str, Any] = {}
    while words:
        word = words.pop(0)
        key, equals, text = word.removeprefix("--").partition("=")
        if not equals:
            if not word.startswith("--"):
                raise UserError(f"'{word}' is not understood: write key=value, such as max_steps=100.")
            follows = bool(words) and not words[0].startswith("--") and "=" not in words[0]
            text = words.pop(0) if follows else "true"
        try:
            values[key.replace("-", "_")] = yaml.load(text, Loader=_Loader) if text else None
        except yaml.YAMLError:
            values[key.replace("-", "_")] = text
    return values


def _out_of_sections(values: dict[str, Any], origin: str, notes: list[str]) -> dict[str, Any]:
    """A nested file laid flat: `model: {path: x}` becomes `model_name_or_path: x`."""
    flat = {key: value for key, value in values.items() if not _is_section(key, value)}
    for section, inside in values.items():
        if not _is_section(section, inside):
            continue
        short = SECTIONS[section]
        laid = {short.get(str(key), str(key)): value for key, value in inside.items()}
        for key, value in laid.items():
            if flat.setdefault(key, value) != value:
                raise UserError(f"{key} is given twice ({origin}, once under {section}): leave one out.")
        read = ", ".join(
            key if short.get(str(key), key) == key else f"{key} as {short[key]}" for key in map(str, inside)
        )
        more = ""
        if section == "lora" and inside and "use_peft" not in {RENAMED.get(key, key) for key in flat}:
            flat["use_peft"] = True
            more = "; use_peft: true with it"
        notes.append(f"{section} ({origin}) is a section, whose keys are read as the file's: {read}{more}.")
    return flat


def _is_section(key: str, value: Any) -> bool:
    return key in SECTIONS and isinstance(value, dict)


def _refuse_two_names(values: dict[str, Any], origin: str) -> None:
    """A file in which two names give one key two values."""
    first: dict[str, str] = {}
    for key, value in values.items():
        name = RENAMED.get(key, key)
        other = first.setdefault(name, key)
        if values[other] != value:
            raise UserError(
                f"{other} and {key} ({origin}) both mean {name}, with different values: leave one out."
            )


def _understand(
    values: dict[str, Any], before: dict[str, Any], origin: str, notes: list[str]
) -> dict[str, Any]:
    """Translate other trainers' names; refuse unknown ones. `before`: what is known from elsewhere."""
    ours: dict[str, Any] = {}
    for key, value in values.items():
        if key in VALUES and isinstance(value, str) and value in VALUES[key]:
            ours[key], more = VALUES[key][value]
            notes.append(f"{key}: {value} ({origin}) is taken for {key}: {ours[key]}.{more}")
        elif key in ROOM_OF:
            ours[key] = value
        elif key in RENAMED:
            ours[RENAMED[key]] = value
            notes.append(f"{key} ({origin}) is taken for {RENAMED[key]}.")
        elif key in WITHOUT_EFFECT:
            notes.append(f"{key} ({origin}) has no effect: {WITHOUT_EFFECT[key]}.")
        elif key not in CONVERTED:
            raise UserError(
                f"There is no key '{key}' ({origin})"
                f"{nearest(key, [*ROOM_OF, *RENAMED, *CONVERTED]) or '.'} `whet config` lists them all."
            )
    for key in [key for key in CONVERTED if key in values]:
        try:
            converted = CONVERTED[key](values[key], {**before, **ours})
        except (TypeError, ValueError) as error:
            raise UserError(f"{key}: {error}.") from None
        ours.update(converted)
        meaning = ", ".join(f"{name}: {entry}" for name, entry in converted.items()) or "nothing to do"
        notes.append(f"{key} ({origin}) is taken for {meaning}.")
    return ours


def _remark(flat: dict[str, Any], origins: dict[str, str], notes: list[str]) -> None:
    """What stands in a file and would be missed in the run: half precision by another name, and an adapter
    that nobody switched on.
    """
    if flat.get("fp16") is True:
        flat.update(fp16=False, bf16=True)
        notes.append(
            f"fp16 ({origins['fp16']}) is taken for bf16: as fast and as small, and it needs no loss scaling."
        )
    settings = [key for key in ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules") if key in flat]
    if settings and "use_peft" not in flat:
        notes.append(
            f"{', '.join(settings)} ({origins[settings[0]]}) have no effect: all weights are trained unless "
            "use_peft is true."
        )


def nearest(name: str, known: Iterable[str]) -> str:
    """': did you mean X?' or nothing."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f": did you mean '{matches[0]}'?" if matches else ""


def _sentence(error: ValidationError) -> str:
    """The first complaint of pydantic as a sentence that names the flat key."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"][1:]]  # without the room
    message = first["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:] if not message[:2].isupper() else message
    if not where:
        return f"{message}."
    if first["type"] == "extra_forbidden":
        return (
            f"'{where[-1]}' is not known inside {'.'.join(where[:-1])}: a task has `weight`, `config` and "
            "`curriculum` (start, top, up, down, window)."
        )
    shown = repr(first.get("input"))
    got = "" if first["type"] == "value_error" or len(shown) > 80 else f" (it is {shown})"
    help_text = _help(where[0])
    return f"{'.'.join(where)}: {message}{got}.{help_text}"


def _help(key: str) -> str:
    room = ROOM_OF.get(key)
    if room is None:
        return ""
    field = ROOM_FIELDS[room].model_fields[key]
    return f" Its meaning: {' '.join(field.description.split())}" if field.description else ""
