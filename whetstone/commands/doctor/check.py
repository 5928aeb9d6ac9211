"""`Check`: one line of the doctor's output."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Check:
    """What was looked at, what is there, and what to do about it. `problem`: training can't run."""

    section: str
    name: str
    status: Status
    detail: str
    remedy: str = ""  # empty where the status is ok


def make_check(section: str, name: str, detail: str, remedy: str = "", *, problem: bool = False) -> Check:
    """Ok without a remedy; with one a warning, or a problem."""
    status: Status = "ok" if not remedy else "problem" if problem else "warning"
    return Check(section=section, name=name, status=status, detail=detail, remedy=remedy)
