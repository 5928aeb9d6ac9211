"""`whet doctor`: devices, packages, engines, languages and isolation of this machine.

Changes nothing and downloads nothing. The isolation is measured: a sandbox is started and asked. For what is
missing it prints how to get it.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
from dataclasses import dataclass

import rich
from rich.text import Text

from whetstone.commands.parser import CommandParser
from whetstone.config.engine_traits import ENGINE_TRAITS
from whetstone.errors import UserError
from whetstone.sandbox.languages import LANGUAGES, missing, tools
from whetstone.sandbox.pool import LocalPool
from whetstone.terminal.text import wrap

SUMMARY = "show what this machine has, and how to get what it lacks"
DESCRIPTION = """
Show devices, torch, rollout engines, languages of programs, how well programs can be isolated here, and the
optional packages. For each missing part: how to get it.
"""
EXAMPLES = """
whet doctor
"""


def add_arguments(parser: CommandParser) -> None:
    """No arguments."""


def run(args: argparse.Namespace) -> None:
    doctor()


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked for."""

    section: str
    name: str
    there: bool
    says: str


def examine() -> list[Check]:
    """Everything that is told, in order."""
    return [*_machine(), *_engines(), *_sandbox(), *_languages(), *_extras()]


def doctor() -> None:
    """Print what was found."""
    console = rich.get_console()
    section = ""
    for finding in examine():
        if finding.section != section:
            section = finding.section
            console.print(f"[bold]{section}[/bold]")
        line = f"  {'yes' if finding.there else 'no '}  {finding.name:<12} {finding.says}"
        if console.is_terminal:
            line = wrap(line, console.width, indent=20)  # where the column of `says` begins
        text = Text(line)
        text.stylize("green" if finding.there else "yellow", 2, 5)
        console.print(text, soft_wrap=True)


def _machine() -> list[Check]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    disk = shutil.disk_usage(os.getcwd()).free / 2**30
    found = [
        _machine_line("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        _machine_line("CPU", f"{cores} cores, {memory:.0f} GB of memory, {disk:.0f} GB of disk free here"),
        _machine_line("torch", f"{torch.__version__}, transformers {_version('transformers')}"),
    ]
    if not torch.cuda.is_available():
        says = "torch sees none: training runs on the CPU, which suits small models only"
        return [*found, Check(section="Machine", name="GPU", there=False, says=says)]
    for number in range(torch.cuda.device_count()):
        shape = torch.cuda.get_device_properties(number)
        found.append(_machine_line(f"GPU {number}", f"{shape.name}, {shape.total_memory / 2**30:.0f} GB"))
    return found


def _machine_line(name: str, says: str) -> Check:
    return Check(section="Machine", name=name, there=True, says=says)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _engines() -> list[Check]:
    return [
        Check(
            section="Engines (rollout_engine)",
            name=name,
            there=_has(traits.package),
            says=(
                f"{traits.package} {_version(traits.package)}"
                if _has(traits.package)
                else traits.install or "comes with whetstone"
            ),
        )
        for name, traits in ENGINE_TRAITS.items()
    ]


def _sandbox() -> list[Check]:
    section = "Sandbox for programs and scorers"
    try:
        with LocalPool() as pool:
            pool.start("python")
            found = Check(section=section, name=str(pool.kind), there=True, says=pool.statement)
            scoring = (
                f"answers are scored in isolated processes ({pool.kind}): no network, no files, no secrets"
            )
            return [found, Check(section=section, name="scoring", there=True, says=scoring)]
    except UserError as error:
        refused = (
            "tasks that evaluate answers (math, integrals, ...) are refused without sandbox_isolation=limits"
        )
        return [
            Check(section=section, name="none", there=False, says=str(error)),
            Check(section=section, name="scoring", there=False, says=refused),
        ]


def _languages() -> list[Check]:
    found = []
    for name, row in LANGUAGES.items():
        absent = missing(name)
        says = row.title if absent is None else row.install_hint
        if absent is None and row.runner == "exec":
            here = tools(name)
            says += ": " + ", then ".join(words[0] for words in here.compilers or (here.command,))
        found.append(Check(section="Languages of programs", name=name, there=absent is None, says=says))
    return found


def _extras() -> list[Check]:
    extras = {"trl": "trainer: trl", "ray": "sandbox_pool: ray", "wandb": "report_to: wandb"}
    extras |= {"tensorboard": "report_to: tensorboard", "trackio": "report_to: trackio"}
    return [
        Check(
            section="Extras",
            name=name,
            there=_has(name),
            says=f"{_version(name)}, for {use}" if _has(name) else f"pip install {name}, for {use}",
        )
        for name, use in extras.items()
    ]
