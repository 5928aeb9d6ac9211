"""The line that shows that a process is alive: its stage (`stages.py`), how far, and since when.

In a terminal it is redrawn by a thread, so that its clock runs during a long forward pass. In a pipe or a
file it is a plain line after ten seconds of one stage, then at growing intervals.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Protocol, Self

import rich
from rich.console import Console
from rich.live import Live
from rich.text import Text

from whetstone.terminal.environment import check_proc, is_main_rank
from whetstone.terminal.stages import Stage, active
from whetstone.terminal.text import duration, escape_controls, wrap

REDRAWS_PER_S = 4
FIRST_LINE_S, LONGEST_PAUSE_S = 10.0, 60.0  # between plain lines of one stage
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class Surroundings(Protocol):
    """What stands before and after the stage in the line."""

    def before(self) -> str: ...
    def after(self) -> list[str]: ...


class Display:
    """`with Display(): ...`; one at a time."""

    def __init__(self, console: Console | None = None, *, first_line_s: float = FIRST_LINE_S) -> None:
        self._console = console or rich.get_console()
        self._first_line_s = first_line_s
        self.surroundings: Surroundings | None = None
        self._live: Live | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        # A pipe with FORCE_COLOR is called a terminal, but keeps every line drawn.
        is_forced = bool(os.environ.keys() & {"FORCE_COLOR", "TTY_COMPATIBLE"})
        if self._console.is_interactive and (self._console.file.isatty() or not is_forced):
            self._live = Live(
                get_renderable=self._render,
                console=self._console,
                refresh_per_second=REDRAWS_PER_S,
                transient=True,
            )
            self._live.start()
            self._console.show_cursor(True)  # a process that is killed leaves the terminal as it was
        else:
            self._thread = threading.Thread(target=self._print_lines, name="display", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._live is not None:
            self._live.stop()
        if self._thread is not None:
            self._thread.join()

    def line(self, now: float, width: int | None = None) -> str:
        """`12/60 steps  sampling 37/128  0:12  1:42 left`; what does not fit in `width` is left out."""
        threads = active()
        parts = [self.surroundings.before()] if self.surroundings is not None else []
        parts += [": ".join(map(str, stages)) for stages in threads]  # evaluation at step 10: sampling 3/8
        if threads:
            parts.append(duration(int(now - threads[0][0].started_at)))
        for part in [] if self.surroundings is None else self.surroundings.after():
            if width is None or len("  ".join([*parts, part])) <= width:
                parts.append(part)
        return "  ".join(parts)

    def _render(self) -> Text:
        now = time.monotonic()
        sign = "*" if self._console.options.ascii_only else _FRAMES[int(now * REDRAWS_PER_S) % len(_FRAMES)]
        text = self.line(now, self._console.width - 3)
        return Text(f"{sign} {text}" if text else "", no_wrap=True, overflow="ellipsis")

    def _print_lines(self) -> None:
        """Until the end: a line for a stage that lasts, at growing intervals."""
        shown: Stage | None = None
        pause = due = 0.0
        while not self._over.wait(min(1.0, self._first_line_s / 2)):
            now, threads = time.monotonic(), active()
            if not threads:
                continue
            if threads[0][0] is not shown:
                shown, pause = threads[0][0], self._first_line_s
                due = shown.started_at + pause
            if now >= due:
                say(f"  {self.line(now)}", console=self._console)
                pause = min(2 * pause, LONGEST_PAUSE_S)
                due = now + pause


_current: Display | None = None


@contextlib.contextmanager
def display(*, is_main: bool = True, console: Console | None = None) -> Iterator[Display]:
    """The display of this process; nested calls share it. Other ranks than the main one show nothing."""
    global _current
    if _current is not None or not is_main:
        yield _current or Display(Console(quiet=True))
        return
    with Display(console) as _current:
        try:
            yield _current
        finally:
            _current = None


@contextlib.contextmanager
def long_command() -> Iterator[None]:
    """For a command that takes minutes: show progress."""
    check_proc()
    with display(is_main=is_main_rank()):
        yield


def say(text: str, *, style: str | None = None, console: Console | None = None) -> None:
    """Print a message: above the live line, wrapped with an indent in a terminal, whole lines elsewhere."""
    console = console or rich.get_console()
    text = escape_controls(text)
    if console.is_terminal:
        text = wrap(text, console.width)
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
