"""Ctrl-C and SIGTERM: the first asks for a stop after the current step, so that nothing is lost; the second
stops at once. A launcher hands on what the terminal has sent as well: the same signal within a moment
counts once.
"""

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Self

import rich


class StopRequest:
    """`with StopRequest() as stop:` and ask `stop.requested` between steps. One rank of several speaks for
    all.
    """

    def __init__(self, *, is_launched: bool = False, speaks: bool = True) -> None:
        self.requested = False
        self._since = 0.0
        self._moment_s = 3.0 if is_launched else 0.0
        self._speaks = speaks
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # handlers can be set only there
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            if time.monotonic() - self._since > self._moment_s:
                raise KeyboardInterrupt
            return
        self.requested, self._since = True, time.monotonic()
        if not self._speaks:
            return
        rich.get_console().print(
            "Stopping: this step is finished and saved first. Once more stops at once and loses it."
        )
