"""`whet doctor`: devices, packages, engines, languages and (measured) isolation of this machine."""

import argparse
import importlib.util
import os
import platform
import shutil
from dataclasses import dataclass

import rich
from rich.text import Text

from whetstone.commands.parser import CommandParser
from whetstone.config.engine_traits import ENGINE_TRAITS
from whetstone.config.sections import SINKS
from whetstone.errors import UserError
from whetstone.run.record import machine, version
from whetstone.sandbox.languages import LANGUAGES, missing, tools
from whetstone.sandbox.pool import LocalPool
from whetstone.terminal.text import wrap

DESCRIPTION = """
Show devices, torch, rollout engines, languages of programs, how well programs can be isolated here, and the
optional packages. For each missing part: how to get it.
"""
EXAMPLES = """
whet doctor
"""


def add_arguments(parser: CommandParser) -> None:
    """No arguments."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked for."""

    section: str
    name: str
    there: bool
    says: str


def examine() -> list[Check]:
    """All checks, in the order of the output."""
    return [*_machine(), *_engines(), *_sandbox(), *_languages(), *_extras()]


def run(args: argparse.Namespace) -> None:
    """Print the checks."""
    console = rich.get_console()
    section = ""
    for check in examine():
        if check.section != section:
            section = check.section
            console.print(f"[bold]{section}[/bold]")
        line = f"  {'yes' if check.there else 'no '}  {check.name:<12} {check.says}"
        if console.is_terminal:
            line = wrap(line, console.width, indent=20)  # where the column of `says` begins
        text = Text(line)
        text.stylize("green" if check.there else "yellow", 2, 5)
        console.print(text, soft_wrap=True)


def _machine() -> list[Check]:
    import torch

    about = machine()
    disk = shutil.disk_usage(os.getcwd()).free / 2**30
    lines = {
        "Python": f"{platform.python_version()} on {about['system']}",
        "CPU": f"{about['cores']} cores, {about['memory_gb']:.0f} GB of memory, {disk:.0f} GB of disk free",
        "torch": f"{torch.__version__}, transformers {version('transformers')}",
    }
    for number in range(torch.cuda.device_count()):
        shape = torch.cuda.get_device_properties(number)
        lines[f"GPU {number}"] = f"{shape.name}, {shape.total_memory / 2**30:.0f} GB"
    checks = [Check("Machine", name, True, says) for name, says in lines.items()]
    if not torch.cuda.is_available():
        says = "torch sees none: training runs on the CPU, which suits small models only"
        checks.append(Check("Machine", "GPU", False, says))
    return checks


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _engines() -> list[Check]:
    checks = []
    for name, traits in ENGINE_TRAITS.items():
        there = _has(traits.package)
        hint = traits.install or "comes with whetstone"
        says = f"{traits.package} {version(traits.package) or 'not installed'}" if there else hint
        checks.append(Check("Engines (rollout_engine)", name, there, says))
    return checks


def _sandbox() -> list[Check]:
    section = "Sandbox for programs and scorers"
    try:
        with LocalPool() as pool:
            pool.start("python")
            there, kind, statement = True, str(pool.kind), pool.statement
        scoring = f"answers are scored in isolated processes ({kind}): no network, no files, no secrets"
    except UserError as error:
        there, kind, statement = False, "none", str(error)
        scoring = "tasks that evaluate answers (math, integrals, ...) need sandbox_isolation=limits"
    return [Check(section, kind, there, statement), Check(section, "scoring", there, scoring)]


def _languages() -> list[Check]:
    checks = []
    for name, language in LANGUAGES.items():
        there = missing(name) is None
        says = language.title if there else language.install_hint
        if there and language.runner == "exec":
            toolchain = tools(name)
            commands = toolchain.compilers or (toolchain.command,)
            says += ": " + ", then ".join(command[0] for command in commands)
        checks.append(Check("Languages of programs", name, there, says))
    return checks


def _extras() -> list[Check]:
    extras = {"trl": "trainer: trl", "ray": "sandbox_pool: ray"}
    extras |= {sink: f"report_to: {sink}" for sink in SINKS}
    return [
        Check("Extras", name, _has(name), f"{version(name) or f'pip install {name}'}, for {use}")
        for name, use in extras.items()
    ]
