"""Standard output and error that cannot end a run: a stream that is closed or fails becomes `/dev/null`."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

NAMES = {1: "stdout", 2: "stderr"}


def open_missing() -> None:
    """Open closed standard streams on the null device; odd characters never stop a print."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    for number, name in NAMES.items():
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
        # A replacement in a test has no encoding to change.
        with contextlib.suppress(AttributeError, ValueError):
            getattr(sys, name).reconfigure(errors="backslashreplace")


class SteadyStream:
    """A text stream whose failures are told once to `lost` and otherwise pass unnoticed."""

    def __init__(self, stream: Any, lost: Callable[[Exception], None]) -> None:
        self._stream, self._lost = stream, lost
        self._failed = False

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], Any]) -> None:
        if self._failed:
            return
        try:
            action()
        except (OSError, ValueError) as error:  # ValueError: it was closed
            self._failed = True
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())  # at exit its buffer is flushed once more
            self._lost(error)
            _untold.append(error)
            tell_log()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_untold: list[Exception] = []  # failures that are not in a log yet


def tell_log() -> None:
    """Say in the log of the run, once there is one, why nothing more is printed."""
    import logging  # nobody else needs it this early, and `whet --help` answers at once

    while _untold and logging.getLogger("whetstone").handlers:
        logging.getLogger("whetstone.steps").warning(
            "Nothing more can be printed (%s): the run continues, and its messages are in this file.",
            _untold.pop(),
        )


@contextlib.contextmanager
def steady_streams(lost: Callable[[Exception], None]) -> Iterator[None]:
    """While it lasts, a failure of standard output or error calls `lost(error)` instead of raising."""
    before = {name: getattr(sys, name) for name in NAMES.values()}
    for name, stream in before.items():
        setattr(sys, name, SteadyStream(stream, lost))
    try:
        yield
    finally:
        sys.stdout.flush()
        for name, stream in before.items():
            setattr(sys, name, stream)
