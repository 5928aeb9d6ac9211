"""Ctrl-C and SIGTERM: the first stops after the current step and saves; the second stops at once.

`timeout 3600 whet train` sends it twice at once, and a launcher forwards what the terminal has sent as well:
repeats within half a second, of a launched process 3 seconds, are ignored.
"""

import signal
import threading
import time
from types import FrameType
from typing import Self

import rich


class StopRequest:
    """`with StopRequest() as stop:` and check `stop.requested` between steps. `verbose`: print a message."""

    def __init__(self, *, is_launched: bool = False, verbose: bool = True) -> None:
        self.requested = False
        self._requested_at = 0.0
        self._repeat_window_s = 3.0 if is_launched else 0.5
        self._verbose = verbose
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # handlers can be set only there
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            if time.monotonic() - self._requested_at > self._repeat_window_s:
                raise KeyboardInterrupt
            return
        self.requested, self._requested_at = True, time.monotonic()
        if self._verbose:
            rich.get_console().print(
                "Stopping after this step, which is saved. Ctrl-C again: quit now and lose this step."
            )
