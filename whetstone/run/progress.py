"""Progress in the terminal: a line per step (or every n-th) and the live line; also in training.log."""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Self

import rich
from rich.console import Console

from whetstone.run.metrics import LogSchedule
from whetstone.terminal.display import display, say
from whetstone.terminal.log import STEP_LINES
from whetstone.terminal.text import counted, duration

_RECENT = 20  # updates from which the time left is estimated
_MOST_LINES = 60  # of a run, in a terminal
_BARS = "▁▂▃▄▅▆▇█"


class Progress:
    """Call `update` after each step; in a `with`, the live line is shown, too."""

    def __init__(
        self,
        num_steps: int,
        *,
        start_step: int = 0,
        logging_steps: int = 1,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_steps = num_steps
        self._step = start_step
        self._console = console or rich.get_console()
        self._schedule = LogSchedule(logging_steps, start_step=start_step)
        every = max(logging_steps, spacing(num_steps)) if self._console.is_terminal else logging_steps
        self._terminal_schedule = LogSchedule(every, start_step=start_step)
        self._clock = clock
        # (time, step) after recent updates; what came before the first (loading, evaluation) is no step.
        self._marks: deque[tuple[float, int]] = deque(maxlen=_RECENT + 1)
        self._accuracies: deque[float] = deque(maxlen=_RECENT)
        self._ends_at: float | None = None
        self._lines = logging.getLogger(STEP_LINES)
        self._stack = contextlib.ExitStack()

    def update(self, step: int, row: Mapping[str, float]) -> None:
        """A step is done; `row` is its row of metrics."""
        self._step = step
        self._marks.append((self._clock(), step))
        if "accuracy" in row:
            self._accuracies.append(row["accuracy"])
        left = self.seconds_left(step, row)
        self._ends_at = None if left is None else self._clock() + left
        is_last = step == self._num_steps
        logged, shown = self._schedule.is_due(step), self._terminal_schedule.is_due(step)
        if logged or is_last:
            self._lines.info("%s", self.line(step, row))
        if shown or is_last:  # in a terminal the live line has the time left
            say(self.line(step, row, time_left=not self._console.is_terminal), console=self._console)

    def before(self) -> str:
        """What the live line begins with."""
        return f"{self._step}/{counted(self._num_steps, 'step')}"

    def after(self) -> list[str]:
        """What the live line ends with: the time left, and the accuracy of recent steps as bars."""
        parts = []
        if self._ends_at is not None and self._step < self._num_steps:
            parts.append(f"{duration(max(0.0, self._ends_at - self._clock()))} left")
        if len(self._accuracies) > 1 and not self._console.options.ascii_only:
            parts.append(f"accuracy {bars(self._accuracies)}")
        return parts

    def line(self, step: int, row: Mapping[str, float], *, time_left: bool = True) -> str:
        """`step 12/60  reward 0.53  accuracy 0.61  2,345 tokens/s  41 % MFU  1:42 left`, as far as known."""
        parts = [f"step {step}/{self._num_steps}"]
        shown = [key for key in ("reward", "accuracy") if key in row] or ["loss"]
        parts += [f"{key} {row[key]:.2f}" for key in shown if key in row]
        if "tokens_per_s" in row:
            parts.append(f"{row['tokens_per_s']:,.0f} tokens/s")
        if "mfu" in row:
            parts.append(f"{100 * row['mfu']:.0f} % MFU")
        left = self.seconds_left(step, row)
        if time_left and left is not None and step < self._num_steps:
            parts.append(f"{duration(left)} left")
        return "  ".join(parts)

    def seconds_left(self, step: int, row: Mapping[str, float]) -> float | None:
        """From the pace of recent steps, evaluations included; after the first, from its own time.

        Compilation is done once and does not count.
        """
        if len(self._marks) >= 2:
            (first_time, first_step), (last_time, last_step) = self._marks[0], self._marks[-1]
            per_step = (last_time - first_time) / max(1, last_step - first_step)
        elif "step_time" in row:
            per_step = row["step_time"] - row.get("setup_time", 0.0)
        else:
            return None
        return per_step * (self._num_steps - step)

    def __enter__(self) -> Self:
        shown = self._stack.enter_context(display(is_main=not self._console.quiet, console=self._console))
        shown.surroundings = self
        self._stack.callback(setattr, shown, "surroundings", None)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def spacing(num_steps: int) -> int:
    """Every how many steps a terminal gets a line, so that a run has at most 60: 1, 2, 5, 10, 20, 50 ..."""
    every = 1
    while num_steps / every > _MOST_LINES:
        every = every * 5 // 2 if str(every)[0] == "2" else every * 2
    return every


def bars(shares: Iterable[float]) -> str:
    """Numbers from 0 to 1 as a row of bars."""
    return "".join(_BARS[min(7, max(0, int(8 * share)))] for share in shares)
