"""`whet tasks`: list the tasks, or show problems of one: prompt, gold answer, score. Loads no weights."""

import argparse
from enum import Enum
from typing import TYPE_CHECKING, Any

from whetstone.commands.config import yaml_value
from whetstone.commands.parser import CommandParser, add_settings, source_and_settings
from whetstone.config import Config, TaskSpec, load
from whetstone.config.data_keys import SETTINGS
from whetstone.config.load import is_known_key
from whetstone.config.overrides import parse_overrides
from whetstone.errors import UserError
from whetstone.terminal.text import cut

if TYPE_CHECKING:
    from whetstone.model.chat import Chat
    from whetstone.types import Problem, Score, TaskScore

DESCRIPTION = """
Without NAME: every task, a line each.
With NAME: sample problems, the prompt as the model sees it, the gold answer and its score.
key=value sets the task's own settings, or any key of `whet config`, such as model_name_or_path.
"""
EXAMPLES = """
whet tasks
whet tasks chain_sum
whet tasks chain_sum max_terms=3 max_digits=2
whet tasks syllogism developer_prompt=DeepSeekZero model_name_or_path=smollm2-135m
whet tasks math path=data/train.json question_column=question answer_column=ground_truth
whet tasks math path=data/train.json --answer 'The answer is \\boxed{42}'
"""
NUM_SAMPLES = 3  # problems that `whet tasks NAME` shows


def add_arguments(parser: CommandParser) -> None:
    add_settings(parser, "NAME")
    parser.add_argument("--answer", metavar="TEXT", help="score this text on the sample problems")


def run(args: argparse.Namespace) -> None:
    name, settings = source_and_settings(args)
    if name is not None:
        print_task(name, settings, args.answer)
    elif settings or args.answer is not None:
        raise UserError("Name the task first: `whet tasks chain_sum key=value`; `whet tasks` lists them all.")
    else:
        print_tasks()


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


def print_task(name: str, settings: list[str], answer: str | None = None) -> None:
    """Sample problems of a task: prompt, gold answer (or `answer`) and score."""
    from whetstone.tasks.constants import describe_constant
    from whetstone.tasks.registry import make_task, task_levels

    config = config_for_task(name, parse_overrides(settings))
    _print_settings(name, config.tasks.datasets[name].config)
    task = make_task(config, name, config.tasks.datasets[name], "train")
    chat, note = _chat(config)
    print(f"{name}: the first problems of training, {note}")
    levels = task_levels(name, config.tasks.datasets[name].config)
    print(f"curriculum: {levels or 'none'}")
    if constant := describe_constant(name):
        print(f"best constant answer: {constant} of problems (default settings)")
    for note in task.notes():
        print(note)
    problems = [task.problem(index) for index in range(min(NUM_SAMPLES, len(task)))]
    scores = [None] * len(problems) if answer is None else _score_answer(config, problems, answer)
    for problem, score in zip(problems, scores, strict=True):
        print_problem(task, problem, chat)
        if score is not None:
            extracted = "no answer found" if score.answer is None else f"taken for the answer: {score.answer}"
            failure = f"\ntests: {', '.join(score.tests)}" if score.tests else ""
            failure += f"\nscoring failed: {score.failure}" if score.failure else ""
            print(f"{' your answer ':-^80}\n{answer}")
            print(f"{' its score ':-^80}\n{extracted}\n{_format_parts(score)}{failure}")
        elif (gold := task.gold(problem)) is not None:
            print(f"{' its score ':-^80}\n{_format_parts(task.score(problem, gold))}")


def print_problem(task: Any, problem: "Problem", chat: "Chat | None") -> None:
    print(f"\n{f' {problem.id} ':-^80}")
    if chat is None:
        print("\n".join(f"{message['role']}: {message['content']}" for message in problem.messages))
    else:
        print(chat.prompt(problem))
    gold = task.gold(problem)
    print(f"{' no gold answer is known ':-^80}" if gold is None else f"{' gold answer ':-^80}\n{gold}")


def _score_answer(config: Config, problems: "list[Problem]", answer: str) -> "list[Score]":
    """Score an untrusted text on each problem in an isolated process, as in training."""
    from whetstone.tasks.scoring.pool import Scorer
    from whetstone.tasks.scoring.process import ScoringRequest

    funcs = [name for name in config.tasks.reward_funcs if name in ("accuracy", "format")]
    only = {"reward_workers": 1, "reward_funcs": funcs or ["accuracy"], "reward_weights": None}
    only |= {"max_reward_failure_fraction": 1.0}  # a failure is shown
    tasks = config.tasks.model_copy(update=only)
    with Scorer(config.model_copy(update={"tasks": tasks})) as scorer:
        for problem in problems:
            scorer.submit(ScoringRequest(problem=problem, text=answer, completion_ids=(), truncated=False))
        return scorer.gather()


def _print_settings(name: str, values: dict[str, Any]) -> None:
    """Every setting of a task with its default, and the value where it was changed."""
    from whetstone.tasks.registry import settings_of

    settings = settings_of(name)
    if not settings:
        return
    print(f"{name}: settings and their defaults (key=value here; config: {{key: value}} in datasets)")
    width = max(len(key) for key in settings)
    for key, default in settings.items():
        changed = f"  (now {yaml_value(values[key])})" if key in values and values[key] != default else ""
        print(f"  {key:<{width}}  {cut(yaml_value(_plain_value(default)), 90)}{changed}")
    print()


def _plain_value(value: Any) -> Any:
    """A default as it is written in a configuration file; reasoning-gym has long lists and enumerations."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain_value(entry) for entry in value]
    return value if isinstance(value, str | int | float | dict | None) else str(value)


def _format_parts(score: "Score | TaskScore") -> str:
    parts = ", ".join(f"{part} {value:g}" for part, value in score.parts.items())
    return parts or "not judged: the reward comes from reward_funcs of your own"


def config_for_task(name: str, values: dict[str, Any]) -> Config:
    """A configuration with one task: known keys are the configuration's, all others the task's settings."""
    columns = SETTINGS.keys() - {"data_path", "dataset_name", "max_samples"}  # settings of the task
    own = {key: value for key, value in values.items() if key in columns or not is_known_key(key)}
    datasets = {name: TaskSpec(weight=1.0, config=own).model_dump()}
    ours = {**{key: value for key, value in values.items() if key not in own}, "datasets": datasets}
    return load(None, [f"{key}={yaml_value(value)}" for key, value in ours.items()]).config


def _chat(config: Config) -> "tuple[Chat | None, str]":
    """The chat format and a note; None where the model's tokenizer cannot be loaded."""
    from whetstone.model.chat import Chat
    from whetstone.model.hub import load_tokenizer

    model = config.model.model_name_or_path
    try:
        tokenizer = load_tokenizer(model)
    except UserError:
        return None, f"as messages (the tokenizer of {model} can't be loaded here)"
    return Chat(tokenizer, config.model), f"as {model} sees them"
