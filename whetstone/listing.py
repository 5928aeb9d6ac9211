"""What `whet config` and `whet tasks` print: the knobs with their meaning, a configuration with its origins,
the problems of a task.

Reads configuration and tasks; loads a tokenizer where a prompt is shown, never weights. Trains nothing.
"""

import json
import shutil
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt

from whetstone.config import Config, Loaded, TaskSpec, flatten, load, make_plan
from whetstone.config.load import ROOM_OF, parse_overrides
from whetstone.config.names import CONVERTED, RENAMED, WITHOUT_EFFECT
from whetstone.errors import UserError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from whetstone.model.chat import Chat
    from whetstone.types import Score

NUM_SAMPLES = 3  # problems that `whet tasks NAME` shows


def print_config(source: str | None, overrides: list[str], *, changed_only: bool = False) -> None:
    """Every key with its default; given a file or overrides, every value and where it came from."""
    loaded = load(source, overrides)
    is_given = source is not None or bool(overrides)
    values, defaults = flatten(loaded.config), flatten(Config())
    for room, field in Config.model_fields.items():
        fields = _fields(room)
        shown = [key for key in fields if not changed_only or values[key] != defaults[key]]
        if not shown:
            continue
        print(f"{room}: {field.annotation.__doc__}")  # type: ignore[union-attr]
        for key in shown:
            origin = f"[{loaded.origins.get(key, 'default')}]" if is_given else ""
            _print_key(key, values[key], bounds(fields[key]), origin, fields[key].description or "")
        print()
    for note in loaded.notes:
        print(f"note: {note}")
    if is_given:
        _print_plan(loaded)


def bounds(field: "FieldInfo") -> str:
    """What a key may be: `1 to 4096`, `> 0`, `grpo | bnpo`; nothing where only the type bounds it."""
    choices = [entry for kind in (field.annotation, *get_args(field.annotation)) for entry in _choices(kind)]
    if choices:
        return " | ".join(choices)
    limits: dict[str, Any] = {}
    for entry in field.metadata:
        match entry:
            case Ge(ge=limit):
                limits["ge"] = limit
            case Gt(gt=limit):
                limits["gt"] = limit
            case Le(le=limit):
                limits["le"] = limit
            case Lt(lt=limit):
                limits["lt"] = limit
    if "ge" in limits and "le" in limits:
        return f"{limits['ge']:g} to {limits['le']:g}"
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    return ", ".join(f"{signs[name]} {limits[name]:g}" for name in signs if name in limits)


def _choices(kind: Any) -> list[str]:
    if kind is bool:
        return ["true", "false"]
    return [str(choice) for choice in get_args(kind)] if get_origin(kind) is Literal else []


def _fields(room: str) -> "dict[str, FieldInfo]":
    return Config.model_fields[room].annotation.model_fields  # type: ignore[union-attr]


def _print_key(key: str, value: Any, limits: str, origin: str, meaning: str) -> None:
    head = f"  {key:<28} {_shown(value):<16} "
    middle = "  ".join(part for part in (origin, f"({limits})" if limits else "") if part)
    line = f"{head}{middle:<18}  {' '.join(meaning.split())}"
    if not sys.stdout.isatty():  # one key, one line: made for grep
        print(line.rstrip())
        return
    width = max(60, shutil.get_terminal_size().columns)
    print("\n".join(textwrap.wrap(line, width, subsequent_indent=" " * 6, break_on_hyphens=False)))


def _shown(value: Any) -> str:
    """A value as one would write it in the file."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6)
    text = text.removesuffix("\n").removesuffix("\n...")
    return (
        json.dumps(value, ensure_ascii=False) if "\n" in text else text
    )  # JSON is YAML, and always one line


def _print_plan(loaded: Loaded) -> None:
    config = loaded.config
    print("plan:")
    for line in make_plan(config, num_problems=config.tasks.dataset_size).lines(config):
        print(f"  {line}")
    with_rows = [
        name for name, spec in config.tasks.datasets.items() if {"path", "dataset"} & set(spec.config)
    ]
    if with_rows:
        print(
            f"  ({', '.join(with_rows)}: the rows have not been read; the run counts them in place of "
            f"dataset_size = {config.tasks.dataset_size:,})"
        )


def recipe_of_checkpoint(overrides: Iterable[str]) -> str | None:
    """The configuration of the run that `checkpoint_path` lies in, if it names one."""
    path = parse_overrides(overrides).get("checkpoint_path")
    config = Path(str(path)).parent / "config.yaml"
    return str(config) if path and config.is_file() else None


def print_tasks() -> None:
    """Every task, a line each."""
    from whetstone.tasks.mixture import list_tasks

    tasks = list_tasks()
    category = None
    for task in sorted(tasks, key=lambda task: (task.category != "whetstone", task.category)):
        if task.category != category:
            category = task.category
            print(f"{'' if task is tasks[0] else chr(10)}{category}")
        print(f"  {task.name:<30} {' '.join(task.description.split())}")
    print(f"\n{len(tasks)} tasks. `whet tasks NAME` shows problems of one.")
    without = ", ".join(sorted(task.name for task in tasks if not task.levels))
    print(f"All have a curriculum (datasets: {{NAME: {{curriculum: true}}}}) but {without}.")


def print_task(name: str, overrides: list[str], answer: str | None = None) -> None:
    """Sample problems of a task: the prompt as the model sees it, the gold answer (or the one given), and
    its score.
    """
    from whetstone.tasks.constants import describe_constant
    from whetstone.tasks.mixture import make_task, task_levels

    config = config_for_task(name, parse_overrides(overrides))
    task = make_task(config, name, config.tasks.datasets[name], "train")
    chat, remark = _chat(config)
    print(f"{name}: the first problems of training, {remark}")
    levels = task_levels(name, config.tasks.datasets[name].config)
    print(f"curriculum: {levels or 'none'}")
    if constant := describe_constant(name):
        print(f"best constant answer: {constant} of problems (default settings)")
    for index in range(min(NUM_SAMPLES, len(task))):
        problem = task.problem(index)
        print(f"\n{f' {problem.id} ':-^80}")
        if chat is None:
            print("\n".join(f"{message['role']}: {message['content']}" for message in problem.messages))
        else:
            print(chat.prompt(problem))
        gold = task.gold(problem)
        print(f"{' no gold answer is known ':-^80}" if gold is None else f"{' gold answer ':-^80}\n{gold}")
        if gold is not None and answer is None:
            print(f"{' its score ':-^80}\n{_parts(task.score(problem, gold))}")
        if answer is not None:
            score = task.score(problem, answer)
            found = "no answer found" if score.answer is None else f"taken for the answer: {score.answer}"
            print(f"{' your answer ':-^80}\n{answer}\n{' its score ':-^80}\n{found}\n{_parts(score)}")


def _parts(score: "Score") -> str:
    return ", ".join(f"{part} {value:g}" for part, value in score.parts.items())


def config_for_task(name: str, values: dict[str, Any]) -> Config:
    """A configuration with one task: known keys are the configuration's, all others the task's settings."""
    understood = (ROOM_OF, RENAMED, CONVERTED, WITHOUT_EFFECT)
    own = {key: value for key, value in values.items() if not any(key in table for table in understood)}
    datasets = {name: TaskSpec(weight=1.0, config=own).model_dump()}
    ours = {**{key: value for key, value in values.items() if key not in own}, "datasets": datasets}
    return load(None, [f"{key}={_shown(value)}" for key, value in ours.items()]).config


def _chat(config: Config) -> "tuple[Chat | None, str]":
    """What formats prompts, and a remark on it; None where the model's tokenizer can't be had."""
    from transformers import AutoTokenizer

    from whetstone.model.chat import Chat
    from whetstone.model.embedded import resolve

    model = config.model.model_name_or_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(resolve(model))
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        return None, f"as messages (the tokenizer of {model} can't be loaded here)"
    return Chat(tokenizer, config.model), f"as {model} sees them"
