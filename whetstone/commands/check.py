"""`whet check`: the preflight of a configuration, or (`--rewards`) probes of its scorers."""

import argparse
import contextlib
import json
from typing import TYPE_CHECKING

import rich
from rich.table import Table
from rich.text import Text

from whetstone.commands.parser import DEFAULT_RECIPE, CommandParser, add_settings, load_config, number
from whetstone.files import json_safe
from whetstone.terminal.findings import STYLES, Status, print_finding
from whetstone.terminal.text import escape_controls

if TYPE_CHECKING:
    from whetstone.config import LoadedConfig
    from whetstone.run.preflight import Preflight
    from whetstone.tasks.check_rewards import TaskCheck

DESCRIPTION = f"""
Sample and score some training prompts of CONFIG (default: {DEFAULT_RECIPE}) as `whet train` does before its
first step: truncation, answers, rewards that differ, failures, lengths, logprobs, one prompt.
--rewards sends gold, empty, junk, nearly right and hostile answers to every scorer instead, without a model.
Exit code 1 where training would be stopped, or where a scorer pays what it should not.
"""
EXAMPLES = """
whet check quickstart
whet check config/grpo.yaml max_completion_length=2048
whet check my_rows.yaml --rewards
whet check quickstart --json
"""
NUM_PROBLEMS = 5  # of a task, for --rewards


def add_arguments(parser: CommandParser) -> None:
    add_settings(parser)
    parser.add_argument("--rewards", action="store_true", help="probe the scorers; loads no model")
    problems = f"problems of each task for --rewards (default: {NUM_PROBLEMS})"
    parser.add_argument("--problems", type=number(int, 2), default=NUM_PROBLEMS, metavar="N", help=problems)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from whetstone.terminal.display import long_command

    with contextlib.nullcontext() if args.json else long_command():
        loaded = load_config(args)
        check = check_rewards if args.rewards else check_training
        return check(loaded, args)


def check_training(loaded: "LoadedConfig", args: argparse.Namespace) -> int:
    from whetstone.run.check import check

    result, is_main = check(loaded)
    stops = result.stops and loaded.config.run.preflight == "stop"
    if is_main and args.json:
        print(json.dumps(result.as_dict(), ensure_ascii=False))
    elif is_main:
        print_preflight(result, stops)
    return int(stops)


def print_preflight(result: "Preflight", stops: bool) -> None:
    """A line for each finding, and the prompt as the model sees it."""
    for finding in result.findings:
        print_finding(finding)
    console = rich.get_console()
    console.print(Text(f"\nThe prompt of {result.problem}:"), soft_wrap=True)
    console.print(Text(escape_controls(result.prompt)), soft_wrap=True)
    verdict = "Training would be stopped." if stops else "Training would start."
    console.print(Text(f"\n{verdict}", style=STYLES[Status.PROBLEM if stops else Status.OK]))


def check_rewards(loaded: "LoadedConfig", args: argparse.Namespace) -> int:
    from whetstone.tasks import check_rewards

    checks = check_rewards.check_rewards(loaded.config, args.problems)
    result = check_rewards.as_dict(checks)
    if args.json:
        print(json.dumps(json_safe(result), ensure_ascii=False))
    else:
        for check in checks:
            print_payments(check)
    return int(result["problems"] > 0)


def print_payments(check: "TaskCheck") -> None:
    """What each probe was paid, as a table; then what looks wrong."""
    table = Table(box=None, padding=(0, 2, 0, 0), title=Text(check.task), title_justify="left")
    columns = ("probe", "answers", "paid in full", "task pays", "reward", "slowest")
    for column in columns:
        table.add_column(column, justify="left" if column == "probe" else "right")
    for result in check.results:
        pays = "-" if result.accuracy is None else f"{result.accuracy:.2f}"
        cells = (result.name, str(result.number), str(result.paid), pays, f"{result.reward:.2f}")
        table.add_row(*cells, f"{1000 * result.slowest_s:.1f} ms", style=STYLES[result.status])
    rich.get_console().print(table)
    for finding in check.findings:
        print_finding(finding, len(check.task))
