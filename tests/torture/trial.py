"""What a trial is, and what it comes to: the words that parts, campaign and table share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(kw_only=True)
class Outcome:
    """`tried` counts in the part's unit (kills, inputs). `losses`: one sentence for each failure."""

    tried: int = 1
    losses: list[str] = field(default_factory=list)
    details: dict[str, float] = field(default_factory=dict)  # added up in the table
    skipped: str = ""  # why it could not be tried here


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a trial works with: its own folder, what trials of a campaign share, and its seed."""

    folder: Path
    shared: Path
    seed: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """`run(name, setting)` is called in a process of its own and has `limit_s` seconds."""

    name: str
    unit: str
    summary: str
    names: Callable[[int], Sequence[str]]  # seed -> all trials of a whole campaign, in the order to run them
    run: Callable[[str, Setting], Outcome]
    limit_s: float
