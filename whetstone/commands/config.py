"""`whet config`: every key with its meaning, or the resolved configuration of a file. Loads no torch."""

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt

from whetstone.commands.parser import CommandParser, add_settings, source_and_settings
from whetstone.config import Config, LoadedConfig, flatten, ineffective_settings, load, make_plan
from whetstone.config.base import key_descriptions
from whetstone.config.load import SECTION_FIELDS
from whetstone.terminal.text import wrap

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

DESCRIPTION = """
Without CONFIG: every key with its default, its bounds and its meaning.
With CONFIG or key=value: every value and where it came from, the names of other trainers that were
translated, and the plan of the run.
"""
EXAMPLES = """
whet config
whet config | grep eval_
whet config config/math.yaml --changed
whet config quickstart prompts_per_step=32
"""

MARKDOWN_HEAD = """
# Configuration reference

Every key: its default, its bounds and its meaning. `whet config --markdown` writes this page; do not edit it.
Keys are flat, in a YAML file (`max_steps: 10`) and on the command line (`max_steps=10`).
[coming_from.md](coming_from.md) has the names of TRL and other trainers that are accepted too.
"""


def add_arguments(parser: CommandParser) -> None:
    add_settings(parser)
    parser.add_argument("--changed", action="store_true", help="leave out keys at their default")
    parser.add_argument("--markdown", action="store_true", help="every key as Markdown (docs/config.md)")


def run(args: argparse.Namespace) -> None:
    if args.markdown:
        print(markdown(), end="")
        return
    source, settings = source_and_settings(args)
    print_config(source, settings, changed_only=args.changed)


def print_config(source: str | None, settings: list[str], *, changed_only: bool = False) -> None:
    """Every key with its default; given a file or settings, every value and where it came from."""
    loaded = load(source, settings)
    _check_tasks(loaded.config)
    shows_origins = source is not None or bool(settings)
    plan = _plan_lines(loaded) if shows_origins else []  # refused before anything is printed
    values, defaults = flatten(loaded.config), flatten(Config())
    for section, meaning, fields, texts in sections():
        shown = [key for key in fields if not changed_only or values[key] != defaults[key]]
        if not shown:
            continue
        print(f"{section}: {meaning}")
        for key in shown:
            origin = f"[{loaded.origins.get(key, 'default')}]" if shows_origins else ""
            _print_key(key, values[key], bounds(fields[key]), origin, texts.get(key, ""))
        print()
    for note in loaded.notes:
        print(f"note: {note}")
    for line in plan:
        print(wrap(line, shutil.get_terminal_size().columns) if sys.stdout.isatty() else line)


def _check_tasks(config: Config) -> None:
    """Raise on a task that does not exist and on settings that it does not have. Reads no rows."""
    from whetstone.tasks.base import check_setting_names
    from whetstone.tasks.registry import gym, settings_of, task_class  # reasoning-gym takes a second

    for name, spec in (*config.tasks.datasets.items(), *(config.tasks.eval_datasets or {}).items()):
        if ":" in name:
            continue  # the user's own code and other packages are not imported here
        if task_class(name) is gym.GymTask:
            gym.check_settings(gym.gym_name(name), spec.config)
        elif known := settings_of(name):
            check_setting_names(spec.config, list(known), name)


def markdown() -> str:
    """docs/config.md: every key with its default, its bounds and its meaning."""
    lines = [MARKDOWN_HEAD.strip()]
    defaults = flatten(Config())
    wrapper = textwrap.TextWrapper(118, subsequent_indent="  ", break_long_words=False)
    wrapper.break_on_hyphens = False
    for section, meaning, fields, texts in sections():
        lines += ["", f"## {section}", "", meaning, ""]
        for key, field in fields.items():
            limits = f" ({bounds(field)})" if bounds(field) else ""
            text = " ".join(f"`{key}`: `{yaml_value(defaults[key])}`{limits}. {texts.get(key, '')}".split())
            lines.append(wrapper.fill(f"- {text}"))
    return "\n".join(lines) + "\n"


def sections() -> "Iterator[tuple[str, str, dict[str, FieldInfo], dict[str, str]]]":
    """Every section of the configuration: its name, its meaning, its fields and their descriptions."""
    for name, section in SECTION_FIELDS.items():
        yield name, " ".join((section.__doc__ or "").split()), section.model_fields, key_descriptions(section)


def bounds(field: "FieldInfo") -> str:
    """The allowed values: `1 to 4096`, `> 0`, `grpo | bnpo`; empty where only the type bounds them."""
    kinds = (field.annotation, *get_args(field.annotation))
    nested = [entry for kind in kinds for entry in getattr(kind, "__metadata__", ())]
    metadata = [*field.metadata, *(limit for e in nested for limit in getattr(e, "metadata", [e]))]
    choices = [choice for kind in kinds for choice in _choices(kind)]
    return " | ".join(text for text in (_limits(metadata), *choices) if text)


def _limits(metadata: list[Any]) -> str:
    signs = {Gt: ("gt", ">"), Ge: ("ge", ">="), Lt: ("lt", "<"), Le: ("le", "<=")}
    limits = {type(e): getattr(e, signs[type(e)][0]) for e in metadata if type(e) in signs}
    if {Ge, Le} <= limits.keys():
        return f"{_plain(limits[Ge])} to {_plain(limits[Le])}"
    return ", ".join(f"{sign} {_plain(limits[kind])}" for kind, (_, sign) in signs.items() if kind in limits)


def _plain(number: Any) -> str:
    return f"{number:,.0f}" if abs(number) >= 100_000 else f"{number:g}"


def _choices(kind: Any) -> list[str]:
    if kind is bool:
        return ["true", "false"]
    return [str(choice) for choice in get_args(kind)] if get_origin(kind) is Literal else []


def _print_key(key: str, value: Any, limits: str, origin: str, meaning: str) -> None:
    head = f"  {key:<28} {yaml_value(value):<16} "
    middle = "  ".join(text for text in (origin, f"({limits})" if limits else "") if text)
    line = f"{head}{middle:<18}  {' '.join(meaning.split())}"
    if not sys.stdout.isatty():  # one key, one line: for grep
        print(line.rstrip())
        return
    width = max(60, shutil.get_terminal_size().columns)
    print("\n".join(textwrap.wrap(line, width, subsequent_indent=" " * 6, break_on_hyphens=False)))


def yaml_value(value: Any) -> str:
    """A value as it is written in a YAML file, on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6)
    text = text.removesuffix("\n").removesuffix("\n...")
    return json.dumps(value, ensure_ascii=False) if "\n" in text else text  # JSON is YAML on one line


def _plan_lines(loaded: LoadedConfig) -> list[str]:
    config = loaded.config
    named = bool(config.tasks.datasets)
    lines: list[str] = []
    if named or config.update.max_steps > 0:
        plan = make_plan(config, num_problems=config.tasks.dataset_size)
        lines = [*plan.lines(config), *ineffective_settings(config, plan)]
    if not named:
        lines = [line for line in lines if "training problems" not in line]
        lines.append("no task is named, so there are no problems: set datasets, dataset_name or data_path")
    with_rows = [n for n, spec in config.tasks.datasets.items() if {"path", "dataset"} & set(spec.config)]
    if with_rows:
        lines.append(
            f"({', '.join(with_rows)}: the rows have not been read; the run counts them in place of "
            f"dataset_size = {config.tasks.dataset_size:,})"
        )
    return ["plan:", *(f"  {line}" for line in lines)]
