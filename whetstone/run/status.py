"""status.json: what the run is doing now, for readers of the run folder; written once a second."""

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any, Self

from whetstone.errors import UserError
from whetstone.terminal.stages import active

NAME = "status.json"
INTERVAL_S = 1.0
MAX_TEXT = 4000  # characters of what was sampled last


class StatusFile:
    """In a `with`: running; afterwards ended, or failed with the reason. A kill leaves `running` behind."""

    def __init__(self, folder: Path, *, is_main: bool = True, interval_s: float = INTERVAL_S) -> None:
        self._path = folder / NAME
        self._is_main, self._interval_s = is_main, interval_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self._newest: tuple[str, str] | None = None
        self.started_at = time.time()

    def __enter__(self) -> Self:
        if self._is_main:
            self._write("running")
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if not self._is_main:
            return
        self._over.set()
        self._thread.join()
        reason = None
        if error is not None:
            reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        self._write("ended" if kind is None else "failed", reason)

    def _run(self) -> None:
        while not self._over.wait(self._interval_s):
            self._write("running")

    def _write(self, state: str, reason: str | None = None) -> None:
        threads = active()
        stages = [[str(stage) for stage in thread] for thread in threads]
        newest = [stage.newest for thread in threads for stage in thread if stage.newest is not None]
        self._newest = newest[-1] if newest else self._newest
        status: dict[str, Any] = {
            "state": state,
            "time": time.time(),
            "started": self.started_at,
            "stages": stages,
            "newest": None if self._newest is None else [text[:MAX_TEXT] for text in self._newest],
            "pid": os.getpid(),
            "host": socket.gethostname(),
            **({"reason": reason[:1000]} if reason else {}),
        }
        # Without a flush to the disk, and a failure is nobody's: the next second brings another one.
        with contextlib.suppress(OSError):
            aside = self._path.with_name(f".{NAME}.part")
            aside.write_text(json.dumps(status), encoding="utf-8")
            aside.replace(self._path)
