"""Findings of a check: ok, warning or problem, with the setting to change; one printed line each."""

from dataclasses import dataclass
from enum import StrEnum

import rich
from rich.text import Text

from whetstone.terminal.text import escape_controls, wrap


class Status(StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.PROBLEM: "bold red"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    name: str
    status: Status
    text: str
    remedy: str = ""


def print_finding(finding: Finding, name_width: int = 12) -> None:
    """`  ok       truncated    0 % of 64 completions ...`, with the remedy behind."""
    console = rich.get_console()
    line = f"  {finding.status:<8} {finding.name:<{name_width}} {finding.text}"
    line = escape_controls(line + (f". {finding.remedy}" if finding.remedy else ""))
    if console.is_terminal:
        line = wrap(line, console.width, indent=12 + name_width)
    text = Text(line)
    text.stylize(STYLES[finding.status], 2, 10)
    console.print(text, soft_wrap=True)
