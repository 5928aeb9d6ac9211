"""What `whet compare` prints while it runs: a header, where each run is, how it ended, the time left."""

import time
from collections.abc import Sequence
from pathlib import Path

import rich
from rich.status import Status

from whetstone.config import load
from whetstone.run.comparison import Cell, cell_results
from whetstone.run.metrics import read_rows
from whetstone.terminal.text import counted

REFRESH_S = 1.0  # in a terminal
LINE_S = 30.0  # in a pipe or a file, where a line stays


class Progress:
    """Messages about the cells of a comparison, whose run folders lie in `runs`."""

    def __init__(self, source: str, cells: Sequence[Cell], runs: Path, jobs: int) -> None:
        self._source, self._cells, self._runs, self._jobs = source, list(cells), runs, jobs
        self._console = rich.get_console()
        self._status: Status | None = None
        self._ended = 0
        self._seconds: list[float] = []  # of the runs that ended well
        self._printed_at = self._looked_at = time.monotonic()

    def begin(self, num_waiting: int) -> None:
        """The header, before the first run is started. `num_waiting`: runs that are not done yet."""
        variants = counted(len({cell.variant for cell in self._cells}), "variant")
        seeds = counted(len({cell.seed for cell in self._cells}), "seed")
        text = f"{counted(len(self._cells), 'run')}: {variants} x {seeds}"
        text += f", {self._jobs} at a time" if self._jobs > 1 else ""
        done = len(self._cells) - num_waiting
        text += f"; {done} of them are done" if done else ""
        left = self._left(num_waiting, [])
        self._print(f"{text}{f'; {left}' if left else ''}.")
        if self._console.is_terminal and num_waiting:
            self._status = self._console.status("starting ...")
            self._status.start()

    def end(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def look(self, running: Sequence[tuple[Cell, float]]) -> None:
        """Where the running cells are; each with the time.monotonic() of its start."""
        now = time.monotonic()
        if now - self._looked_at < REFRESH_S or (self._status is None and now - self._printed_at < LINE_S):
            return
        self._looked_at = now
        states = [self._state(cell, now - started_at) for cell, started_at in running]
        waiting = len(self._cells) - self._ended - len(running)
        left = self._left(waiting, [(share, seconds) for _, share, seconds in states])
        text = "; ".join(text for text, _, _ in states) + (f"; {left}" if left else "")
        if self._status is not None:
            self._status.update(text)
        elif states:
            self._print(text)

    def finished(self, cell: Cell, seconds: float | None) -> None:
        """`seconds` None: it had been done before."""
        results = cell_results(self._runs / cell.name)
        assert results is not None, f"{cell.name} ended well without train_results.json"
        self._seconds.append(results["seconds"] if seconds is None else seconds)
        note = "done before" if seconds is None else f"{seconds:.0f} s"
        before, after = results["accuracy_before"]["mean"], results["accuracy_after"]["mean"]
        self._say(cell, f"{100 * before:.1f} % -> {100 * after:.1f} % ({note})")

    def failed(self, cell: Cell, line: str) -> None:
        self._say(cell, f"failed: {line}")

    def _say(self, cell: Cell, text: str) -> None:
        self._ended += 1
        num = len(self._cells)
        left = self._left(num - self._ended, [])
        self._print(f"run {self._ended}/{num}  {cell.name}  {text}{f'; {left}' if left else ''}")

    def _state(self, cell: Cell, seconds: float) -> tuple[str, float | None, float]:
        """A running cell in a few words, the share of its steps that is done, and `seconds`."""
        rows = read_rows(self._runs / cell.name / "metrics.jsonl")
        steps = [row["step"] for row in rows if row["kind"] == "train"]
        planned = load(self._source, cell.settings).config.update.max_steps
        step = max(steps, default=0)
        of_all = f"/{planned}" if planned > 0 else ""
        share = step / planned if planned > 0 and step else None
        return f"{cell.name}: step {step}{of_all}, {seconds:.0f} s", share, seconds

    def _left(self, waiting: int, running: Sequence[tuple[float | None, float]]) -> str:
        """The time left by runs that ended, else by running ones (share done, seconds); empty: unknown."""
        known = self._seconds or [seconds / share for share, seconds in running if share]
        if not known or not (waiting or running):
            return ""
        mean = sum(known) / len(known)
        rest = sum(max(0.0, mean - seconds) for _, seconds in running) + mean * waiting
        minutes = rest / max(1, min(self._jobs, waiting + len(running))) / 60
        return f"about {minutes:.0f} min left" if minutes >= 1 else "less than a minute left"

    def _print(self, line: str) -> None:
        self._printed_at = time.monotonic()
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
