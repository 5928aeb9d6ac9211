"""What `whet config` and `whet tasks` print: the knobs with their meaning, a configuration with its origins,
the problems of a task.

Reads configuration and tasks; loads a tokenizer where a prompt is shown, never weights. Trains nothing.
"""

import json
import shutil
import sys
import textwrap
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt

from whetstone.config import Config, Loaded, TaskSpec, flatten, load, make_plan
from whetstone.config.aliases import CONVERTED, REFUSED, RENAMED, WITHOUT_EFFECT
from whetstone.config.load import ROOM_OF, parse_overrides
from whetstone.errors import UserError
from whetstone.terminal.text import wrap

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from whetstone.model.chat import Chat
    from whetstone.types import Problem, Score, TaskScore

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
        return f"{_plain(limits['ge'])} to {_plain(limits['le'])}"
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    return ", ".join(f"{signs[name]} {_plain(limits[name])}" for name in signs if name in limits)


def _plain(number: Any) -> str:
    return f"{number:,.0f}" if abs(number) >= 100_000 else f"{number:g}"


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
    named = bool(config.tasks.datasets)
    print("plan:")
    lines: list[str] = []
    if named or config.update.max_steps > 0:
        lines = make_plan(config, num_problems=config.tasks.dataset_size).lines(config)
    if not named:
        lines = [line for line in lines if "training problems" not in line]
        lines.append("no task is named, so there are no problems: set datasets, dataset_name or data_path")
    for line in lines:
        line = f"  {line}"
        print(wrap(line, shutil.get_terminal_size().columns) if sys.stdout.isatty() else line)
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
    from whetstone.tasks.registry import list_tasks

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
    from whetstone.tasks.registry import make_task, task_levels

    config = config_for_task(name, parse_overrides(overrides))
    _print_settings(name, config.tasks.datasets[name].config)
    task = make_task(config, name, config.tasks.datasets[name], "train")
    chat, remark = _chat(config)
    print(f"{name}: the first problems of training, {remark}")
    levels = task_levels(name, config.tasks.datasets[name].config)
    print(f"curriculum: {levels or 'none'}")
    if constant := describe_constant(name):
        print(f"best constant answer: {constant} of problems (default settings)")
    for note in task.notes():
        print(note)
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
            score = _judged(config, problem, answer)
            found = "no answer found" if score.answer is None else f"taken for the answer: {score.answer}"
            failed = f"\nscoring failed: {score.failure}" if score.failure else ""
            print(f"{' your answer ':-^80}\n{answer}\n{' its score ':-^80}\n{found}\n{_parts(score)}{failed}")


def _judged(config: Config, problem: "Problem", answer: str) -> "Score":
    """The score of a text that nobody vouches for: in an isolated process, as in training."""
    from whetstone.tasks.scoring.pool import Scorer
    from whetstone.tasks.scoring.process import ScoringRequest

    alone = config.tasks.model_copy(
        update={"reward_workers": 1, "reward_funcs": ["accuracy"], "reward_weights": None}
    )
    with Scorer(config.model_copy(update={"tasks": alone})) as scorer:
        scorer.submit(ScoringRequest(problem=problem, text=answer, completion_ids=(), truncated=False))
        return scorer.gather()[0]


def _print_settings(name: str, given: dict[str, Any]) -> None:
    """Every setting of a task with its default, and the value where another was given."""
    from whetstone.tasks.settings import settings_of

    settings = settings_of(name)
    if not settings:
        return
    print(f"{name}: settings and their defaults (key=value here; config: {{key: value}} in datasets)")
    width = max(len(key) for key in settings)
    for key, default in settings.items():
        changed = f"  (now {_shown(given[key])})" if key in given and given[key] != default else ""
        print(f"  {key:<{width}}  {_shown_default(default)}{changed}")
    print()


def _shown_default(value: Any, width: int = 90) -> str:
    """One line of a default; reasoning-gym has long lists and enumerations among them."""
    text = _shown(_unwrapped(value))
    return text if len(text) <= width else f"{text[: width - 4]} ..."


def _unwrapped(value: Any) -> Any:
    """A default as one would write it in a configuration."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list | tuple | set | frozenset):
        return [_unwrapped(each) for each in value]
    return value if isinstance(value, str | int | float | dict | None) else str(value)


def _parts(score: "Score | TaskScore") -> str:
    parts = ", ".join(f"{part} {value:g}" for part, value in score.parts.items())
    return parts or "not judged: the reward comes from reward_funcs of your own"


def config_for_task(name: str, values: dict[str, Any]) -> Config:
    """A configuration with one task: known keys are the configuration's, all others the task's settings."""
    whole_sets = ("data_path", "dataset_name", "max_samples")  # columns are the task's own settings
    understood = (ROOM_OF, RENAMED, CONVERTED, WITHOUT_EFFECT, REFUSED, whole_sets)
    own = {key: value for key, value in values.items() if not any(key in table for table in understood)}
    datasets = {name: TaskSpec(weight=1.0, config=own).model_dump()}
    ours = {**{key: value for key, value in values.items() if key not in own}, "datasets": datasets}
    return load(None, [f"{key}={_shown(value)}" for key, value in ours.items()]).config


def _chat(config: Config) -> "tuple[Chat | None, str]":
    """What formats prompts, and a remark on it; None where the model's tokenizer can't be had."""
    from transformers import AutoTokenizer

    from whetstone.model.chat import Chat
    from whetstone.model.hub import resolve

    model = config.model.model_name_or_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(resolve(model), trust_remote_code=False)
    except UserError:
        raise
    except Exception:  # tokenizers raises plain exceptions for broken files
        return None, f"as messages (the tokenizer of {model} can't be loaded here)"
    return Chat(tokenizer, config.model), f"as {model} sees them"
