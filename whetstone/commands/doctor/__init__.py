"""`whet doctor`: what this machine has for training, what it lacks, and one remedy for each lack.

Each module has the checks of some sections. Without CONFIG everything is looked at, and a missing part is a
warning. With CONFIG only what that run needs is looked at, and a missing part is a problem.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

import rich
from rich.text import Text

from whetstone import __version__
from whetstone.commands.doctor.check import Check
from whetstone.commands.parser import CommandParser, add_settings, source_and_settings
from whetstone.config import Config, load
from whetstone.terminal.text import counted, escape_controls, wrap

DESCRIPTION = """
Look at Python, torch, GPUs and driver, memory, disks, engines, sandbox, languages and optional packages.
Each line is ok, a warning or a problem, with what to do. Exit code 1 where training could not run.
With CONFIG: only what that run needs, and whether its model is available.
"""
EXAMPLES = """
whet doctor
whet doctor config/grpo.yaml rollout_engine=vllm report_to=wandb
whet doctor quickstart device=cuda
whet doctor --json | python -m json.tool
"""
STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
NAME_COLUMN = 11


def add_arguments(parser: CommandParser) -> None:
    add_settings(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document (docs/doctor.md)")


def run(args: argparse.Namespace) -> int:
    """Print the checks; exit code 1 with a problem."""
    source, settings = source_and_settings(args)
    is_named = source is not None or bool(settings)
    checks = examine(load(source, settings).config if is_named else None)
    if args.json:
        print(document(checks))
    else:
        print_checks(checks)
    return int(has_problem(checks))


def examine(config: Config | None = None) -> list[Check]:
    """All checks, in the order of the output."""
    from whetstone.commands.doctor.gpu import check_gpus
    from whetstone.commands.doctor.machine import (
        check_folders,
        check_languages,
        check_machine,
        check_sandbox,
    )
    from whetstone.commands.doctor.model import check_model
    from whetstone.commands.doctor.packages import check_engines, check_extras, check_requirements

    checks = [*check_machine(config), *check_folders(config), *check_requirements(config)]
    if not any(check.name == "torch" and check.status == "problem" for check in checks):
        checks += check_gpus(config)
    for look in (check_model, check_engines, check_sandbox, check_languages, check_extras):
        checks += look(config)
    return checks


def has_problem(checks: Sequence[Check]) -> bool:
    return any(check.status == "problem" for check in checks)


def document(checks: Sequence[Check]) -> str:
    """One JSON object: version, whether training can run, and an object for each line of the output."""
    whole = {"whetstone": __version__, "ok": not has_problem(checks), "checks": list(map(asdict, checks))}
    return json.dumps(whole, indent=1)


def print_checks(checks: Sequence[Check]) -> None:
    """A line for each check under the name of its section, then how many problems there are."""
    console = rich.get_console()
    width = max((len(check.name) for check in checks), default=0)
    section = ""
    for check in checks:
        if check.section != section:
            section = check.section
            console.print(Text(section, style="bold"))
        remedy = f" -> {check.remedy}" if check.remedy else ""
        line = escape_controls(f"  {check.status:<7}  {check.name:<{width}}  {check.detail}{remedy}")
        if console.is_terminal:
            line = wrap(line, console.width, indent=NAME_COLUMN + width + 2)  # where the details begin
        text = Text(line)
        text.stylize(STYLES[check.status], 2, 2 + len(check.status))
        console.print(text, soft_wrap=True)
    counts = Counter(check.status for check in checks)
    ending = "Training could not run." if counts["problem"] else "Training can run."
    summary = f"{counted(counts['problem'], 'problem')}, {counted(counts['warning'], 'warning')}"
    console.print(Text(f"{summary}. {ending}"), soft_wrap=True)
