"""A command in a pseudo-terminal: type, and read what appears on the screen."""

import contextlib
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
from fcntl import ioctl


class PseudoTerminal:
    """`with PseudoTerminal("chat", "pebble") as terminal:` runs `whet chat pebble`; `code` other Python."""

    def __init__(
        self, *arguments: str, code: str | None = None, columns: int = 100, **environment: str
    ) -> None:
        self.program = ["-m", "whetstone", *arguments] if code is None else ["-c", code]
        self.columns = columns
        self.environment = {**os.environ, "TERM": "xterm", **environment}
        self.screen = ""

    def __enter__(self):
        self._own, other = pty.openpty()
        ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 40, self.columns, 0, 0))
        command = [sys.executable, *self.program]
        self.process = subprocess.Popen(
            command, stdin=other, stdout=other, stderr=other, env=self.environment, preexec_fn=_take_terminal
        )
        os.close(other)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._own)

    def type(self, keys: str) -> None:
        os.write(self._own, keys.encode())

    def read(self, timeout_s: float = 60) -> None:
        """Wait until something appears on the screen."""
        ready, _, _ = select.select([self._own], [], [], timeout_s)
        data = b""
        if ready:
            with contextlib.suppress(OSError):  # the process has left
                data = os.read(self._own, 65536)
        assert data, f"nothing more appeared:\n{self.screen}"
        self.screen += data.decode(errors="replace")

    def wait_for(self, text: str) -> str:
        """What appeared up to `text`; the rest stays for the next call."""
        while text not in self.screen:
            self.read()
        seen, _, self.screen = self.screen.partition(text)
        return seen


def _take_terminal() -> None:
    os.setsid()
    ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
