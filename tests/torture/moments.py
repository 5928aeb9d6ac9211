"""Moments of a run, seen from outside in its folder: when a file appears, grows, is renamed or removed.

A moment is told by two looks at the folder, so a resumed run's old files do not count.
"""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Look = dict[str, tuple[int, int]]  # relative path -> (inode, size)


def look(folder: Path) -> Look:
    """Every file and folder of a run, two levels down and what is being written."""
    found: Look = {}
    _add(str(folder), "", found, depth=3)
    return found


def _add(folder: str, prefix: str, found: Look, depth: int) -> None:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                    is_folder = entry.is_dir(follow_symlinks=False)
                except OSError:
                    continue  # renamed or removed meanwhile
                name = prefix + entry.name
                found[name] = (status.st_ino, 0 if is_folder else status.st_size)
                if is_folder and depth > 1:
                    _add(entry.path, name + "/", found, depth - 1)
    except OSError:
        return  # not there yet, or gone


def _new(before: Look, now: Look, accept: Callable[[str], bool]) -> bool:
    return any(accept(name) and (name not in before or before[name][0] != now[name][0]) for name in now)


def _changed(before: Look, now: Look, name: str) -> bool:
    return name in now and now[name] != before.get(name)


def _is_checkpoint(name: str) -> bool:
    return name.startswith("checkpoint-") and "/" not in name


def _is_writing(name: str) -> bool:
    return name.startswith(".checkpoint-") and "/" not in name


def _in_writing(part: str) -> Callable[[str], bool]:
    return lambda name: name.startswith(".checkpoint-") and part in name


# What is seen at each moment: (look at the start, look now, last step of the run) -> it has come.
EVENTS: dict[str, Callable[[Look, Look, int], bool]] = {
    "configuration written": lambda before, now, last: _changed(before, now, "config.yaml"),
    "log begun": lambda before, now, last: _changed(before, now, "training.log"),
    "metric row": lambda before, now, last: _changed(before, now, "metrics.jsonl"),
    "completions written": lambda before, now, last: _new(
        before, now, lambda name: name.startswith("completions/")
    ),
    "evaluation written": lambda before, now, last: _new(
        before, now, lambda name: name.startswith("eval_results/")
    ),
    "last evaluation written": lambda before, now, last: _changed(
        before, now, f"eval_results/eval_step_{last}.json"
    ),
    "checkpoint begun": lambda before, now, last: _new(before, now, _is_writing),
    "checkpoint's weights begun": lambda before, now, last: _new(
        before, now, _in_writing("model.safetensors")
    ),
    "checkpoint's state begun": lambda before, now, last: _new(before, now, _in_writing("state/")),
    "checkpoint's numbers begun": lambda before, now, last: _new(before, now, _in_writing("scalars.pt")),
    "checkpoint sealed": lambda before, now, last: _new(before, now, _in_writing("whetstone.json")),
    "checkpoint renamed": lambda before, now, last: _new(before, now, _is_checkpoint),
    "last checkpoint renamed": lambda before, now, last: _new(
        before, now, lambda name: name == f"checkpoint-{last}"
    ),
    "old checkpoint's removal": lambda before, now, last: any(
        _is_checkpoint(name.partition("/")[0]) and name not in now for name in before
    ),
    "final model begun": lambda before, now, last: _new(
        before, now, lambda name: name.startswith(".final_model")
    ),
    "final model renamed": lambda before, now, last: _new(before, now, lambda name: name == "final_model"),
    "results written": lambda before, now, last: _changed(before, now, "train_results.json"),
    "report written": lambda before, now, last: _changed(before, now, "report.html"),
}
# What happens more than once in every run.
REPEATED = (
    "completions written",
    "evaluation written",
    *(name for name in EVENTS if name.startswith("checkpoint")),
)
# How long after what is seen a kill may come: writing a checkpoint takes this long.
LONGEST_DELAY_S = 0.3


@dataclass(frozen=True, kw_only=True)
class Moment:
    event: str  # one of EVENTS, or "any time"
    repeats: int = 1  # how often it has to happen
    delay_s: float = 0.0

    @classmethod
    def draw(cls, rng: random.Random, seconds: float, *, events: list[str] | None = None) -> "Moment":
        """A random one for a run that takes `seconds`."""
        event = rng.choice([*(events or EVENTS), "any time"])
        if event == "any time":
            return cls(event=event, delay_s=rng.uniform(0.0, seconds))
        repeats = (
            rng.randint(1, 4) if event == "metric row" else rng.randint(1, 2) if event in REPEATED else 1
        )
        delay_s = rng.choice([0.0, rng.uniform(0.0, 0.02), rng.uniform(0.0, LONGEST_DELAY_S)])
        return cls(event=event, repeats=repeats, delay_s=delay_s)


class Watcher:
    """Says when a moment of a run has come."""

    def __init__(self, folder: Path, moment: Moment, last_step: int) -> None:
        self._folder, self._moment, self._last = folder, moment, last_step
        self._before = look(folder)
        self._seen = 0

    def has_come(self) -> bool:
        if self._moment.event == "any time":
            return True
        now = look(self._folder)
        if EVENTS[self._moment.event](self._before, now, self._last):
            self._seen += 1
        # The next repetition is told from here. What was seen and is gone counts as removed only once.
        self._before = now
        return self._seen >= self._moment.repeats
