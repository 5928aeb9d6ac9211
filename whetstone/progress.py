"""The line that shows a run is alive: step, reward, accuracy, tokens/s, time left.

In a terminal it is one line that moves; elsewhere (a file, a pipe) plain lines, at most one per logging
step. The same lines go to training.log. Reads the rows it is given and a clock; computes no metric.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

import rich
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress

from whetstone.metrics import STEP_LINES, Cadence

_RECENT = 20  # updates from which the time left is estimated


class Progress:
    """Call `update` after each step and `close` at the end (or use it in a `with`)."""

    def __init__(
        self,
        num_steps: int,
        *,
        start_step: int = 0,
        logging_steps: int = 1,
        logging_first_step: bool = True,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_steps = num_steps
        self._cadence = Cadence(logging_steps, first=logging_first_step, start_step=start_step)
        self._console = console or rich.get_console()
        self._clock = clock
        # (time, step) after recent updates; what came before the first (loading, evaluation) is no step.
        self._marks: deque[tuple[float, int]] = deque(maxlen=_RECENT + 1)
        self._lines = logging.getLogger(STEP_LINES)
        self._live: RichProgress | None = None
        if self._console.is_terminal:
            self._live = RichProgress(
                BarColumn(bar_width=24),
                TextColumn("{task.fields[line]}"),
                console=self._console,
                auto_refresh=False,
            )
            self._bar = self._live.add_task(
                "", total=num_steps, completed=start_step, line=f"step {start_step}/{num_steps}"
            )
            self._live.start()

    def update(self, step: int, row: Mapping[str, float]) -> None:
        """A step is done; `row` is its row of metrics."""
        self._marks.append((self._clock(), step))
        line = self.line(step, row)
        shown = self._cadence.is_due(step) or step == self._num_steps
        if shown:
            self._lines.info("%s", line)
        if self._live is not None:
            self._live.update(self._bar, completed=step, line=line, refresh=True)
        elif shown:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def line(self, step: int, row: Mapping[str, float]) -> str:
        """`step 12/60  reward 0.53  accuracy 0.61  2,345 tokens/s  41 % MFU  1:42 left`, without what is not
        known.
        """
        parts = [f"step {step}/{self._num_steps}"]
        parts += [f"{key} {row[key]:.2f}" for key in ("reward", "accuracy") if key in row]
        if "tokens_per_s" in row:
            parts.append(f"{row['tokens_per_s']:,.0f} tokens/s")
        if "mfu" in row:
            parts.append(f"{100 * row['mfu']:.0f} % MFU")
        left = self.seconds_left(step, row)
        if left is not None and step < self._num_steps:
            parts.append(f"{duration(left)} left")
        return "  ".join(parts)

    def seconds_left(self, step: int, row: Mapping[str, float]) -> float | None:
        """From the pace of recent steps, evaluations included; after the first, from its own time."""
        if len(self._marks) >= 2:
            (first_time, first_step), (last_time, last_step) = self._marks[0], self._marks[-1]
            per_step = (last_time - first_time) / max(1, last_step - first_step)
        elif "time/step" in row:
            per_step = row["time/step"]
        else:
            return None
        return per_step * (self._num_steps - step)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def duration(seconds: float) -> str:
    """`0:07`, `1:42`, `2:03:04`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
