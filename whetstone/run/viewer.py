"""`watch`: `whet watch` beside the run, in a process of its own. The run does not depend on it."""

import contextlib
import logging
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

logger = logging.getLogger("whetstone")
STOP_S = 2.0


class Viewer:
    """In a `with`: the page is served, and its address is logged once it is known."""

    def __init__(self, folder: Path, *, is_wanted: bool) -> None:
        self._folder, self._is_wanted = folder, is_wanted
        self._process: subprocess.Popen[str] | None = None
        self.address: str | None = None

    def __enter__(self) -> Self:
        if self._is_wanted:
            command = [sys.executable, "-m", "whetstone", "watch", str(self._folder.resolve())]
            with contextlib.suppress(OSError):
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    start_new_session=True,  # Ctrl-C is for the run, which ends the viewer
                )
                threading.Thread(target=self._read_address, name="viewer", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read_address(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            match = re.search(r"http://\S+", line)
            if match is not None and self.address is None:
                self.address = match[0]
                logger.info(f"Watch at {self.address}")


def is_wanted(watch: bool | str) -> bool:
    """`auto`: where a person is at the terminal."""
    return sys.stdout.isatty() if watch == "auto" else bool(watch)
