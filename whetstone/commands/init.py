"""`whet init`: a configuration for rows, from what they look like. Loads no model."""

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from whetstone.commands.check import print_payments
from whetstone.commands.parser import CommandParser, add_settings, source_and_settings
from whetstone.commands.tasks import NUM_SAMPLES, print_problem
from whetstone.config import build, load, recipe_folders
from whetstone.config.overrides import parse_overrides
from whetstone.errors import UserError

DESCRIPTION = """
Write NAME.yaml for DATA (a file, a folder, a data set of the hub, gsm8k, math, math500, mbpp, humaneval), and
NAME_reward.py where the rows have no answer to compare with. Show prompts, and what answers are paid.
key=value are settings of the rows, such as prompt_column; run_name sets NAME. Nothing is overwritten.
"""
EXAMPLES = """
whet init my_rows.csv
whet init my_rows.jsonl prompt_column=text answer_column=label run_name=first
"""
_SHOWN = ("gold", "one character", "other gold", "no answer", "no text")  # of the probes
_PROMPT = "Think first. Then give your final answer between <answer> and </answer>."


def add_arguments(parser: CommandParser) -> None:
    add_settings(parser, "DATA")


def run(args: argparse.Namespace) -> None:
    from whetstone.tasks import check_rewards, code, registry, row_files, row_reader, rows

    data, arguments = source_and_settings(args)
    if data is None:
        raise UserError("Name the data first: `whet init my_rows.csv`.")
    settings = parse_overrides(arguments)
    name = re.sub(r"[^\w.-]", "_", str(settings.pop("run_name", None) or Path(data).stem or "rows"))
    file, stub = f"{name}.yaml", f"{name}_reward.py"
    for path in (file, stub):
        if Path(path).exists():
            raise UserError(f"{path} is there already: remove it, or choose another name by run_name=NAME.")
    source = "path" if Path(data).exists() or Path(data).suffix else "dataset"
    own = [split for split in ("test", "validation") if split in row_files.splits_of(Path(data))]
    settings = {source: data, **({"eval_split": own[0]} if own else {"eval_fraction": 0.1}), **settings}
    reader = row_reader.Reader(rows.read(settings, "train", "rows"), settings, data)
    columns = reader.columns
    is_code = {"tests", *code.PYTHON_TESTS} & set(columns) and set(code.STATEMENT_COLUMNS) & set(columns)
    kind = "code" if is_code else "countdown" if {"nums", "target"} <= set(columns) else "rows"
    entry: dict[str, Any] = {"datasets": {kind: {"config": settings}}}
    config = build({**entry, "reward_funcs": ["own:reward"]})  # never called: any will do
    len(registry.make_tasks(config, "train")[kind])  # complains before anything is written
    examples = reader.read(imitates=False, compares_completions=True) if kind == "rows" else []
    is_rated = kind != "rows" or any(example.answer is not None for example in examples)
    has_system = any(example.messages[0]["role"] == "system" for example in examples)
    entry |= {"developer_prompt": _PROMPT} if examples and is_rated and not has_system else {}
    text = yaml.safe_dump(entry, sort_keys=False, allow_unicode=True, width=110)
    values = {"name": name, "rows": text, "reward": "accuracy" if is_rated else f"{stub}:reward"}
    values["columns"] = row_reader.list_columns(columns)
    for path, template in {file: "run.txt", **({} if is_rated else {stub: "reward.txt"})}.items():
        text = (recipe_folders()[0] / "init" / template).read_text("utf-8")
        Path(path).write_text(text.format(**values), "utf-8")

    config = load(file).config
    task = registry.make_tasks(config, "train")[kind]
    print("\n".join(task.notes()))
    for index in range(min(NUM_SAMPLES, len(task))):
        print_problem(task, task.problem(index), None)
    for check in check_rewards.check_rewards(config, NUM_SAMPLES):
        print_payments(replace(check, results=tuple(r for r in check.results if r.name in _SHOWN)))
    print(f"\n{file} is written, with the model {config.model.model_name_or_path} (or pebble, on a CPU).")
    if not is_rated:
        print(f"{stub} is written: the rows have no answers to compare with, so write your reward there.")
    print(f"Next:\n  whet check {file}\n  whet train {file}")
