"""What the process is doing at the moment: named stages with a count, shown by `display.py`.

    with stage("sampling", total=128):
        for sample in engine.generate(...):
            advance()

Stages nest, and each thread has its own.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(eq=False)
class Stage:
    name: str
    total: int | None
    count: int = 0
    tokens: int = 0  # sampled so far, also of what is unfinished
    started_at: float = field(default_factory=time.monotonic)
    thread: int = field(default_factory=threading.get_ident)
    newest: tuple[str, str] | None = None  # what was sampled last: question and completion

    def __str__(self) -> str:
        text = self.name
        if self.total is not None and self.total >= 2:
            text += f" {min(self.count, self.total):,}/{self.total:,}"
        return f"{text}, {self.tokens:,} tokens" if self.tokens else text


_active: list[Stage] = []  # in the order in which they began; append and remove are atomic


@contextlib.contextmanager
def stage(name: str, total: int | None = None) -> Iterator[Stage]:
    """Until it ends, this thread is at `name`; with a `total`, `advance` counts towards it."""
    entry = Stage(name, total)
    _active.append(entry)
    try:
        yield entry
    finally:
        _active.remove(entry)


def advance(number: int = 1) -> None:
    """So much more of this thread's innermost stage is done."""
    if (entry := _innermost()) is not None:
        entry.count += number


def add_tokens(number: int) -> None:
    """This thread's innermost stage sampled so many more."""
    if (entry := _innermost()) is not None:
        entry.tokens += number


def show(question: str, completion: str) -> None:
    """What this thread's innermost stage sampled last."""
    if (entry := _innermost()) is not None:
        entry.newest = (question, completion)


def reach(count: int) -> None:
    """So much of this thread's innermost stage is done in all."""
    if (entry := _innermost()) is not None:
        entry.count = count


def _innermost() -> Stage | None:
    me = threading.get_ident()
    return next((entry for entry in reversed(_active) if entry.thread == me), None)


def active() -> list[list[Stage]]:
    """The stages of each thread, outermost first; the main thread's come first."""
    threads: dict[int, list[Stage]] = {}
    main = threading.main_thread().ident
    for entry in sorted(_active, key=lambda entry: entry.thread != main):
        threads.setdefault(entry.thread, []).append(entry)
    return list(threads.values())
