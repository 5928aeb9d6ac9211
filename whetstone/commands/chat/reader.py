"""Questions from the terminal: line editing, a history file, questions of several lines."""

import contextlib
import os
from pathlib import Path
from typing import Self

from whetstone.terminal.display import say

PROMPT, CONTINUATION = "> ", "... "
BLOCK = '"""'
HISTORY_LINES = 1000


def history_file() -> Path:
    """In the user's state folder: $XDG_STATE_HOME, or ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "whetstone" / "chat_history"


class Reader:
    """`read` raises EOFError at Ctrl-D. Ctrl-C discards what was typed."""

    def __enter__(self) -> Self:
        with contextlib.suppress(ImportError, OSError):  # Python without readline; no history yet
            import readline

            readline.set_history_length(HISTORY_LINES)
            readline.read_history_file(history_file())
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ImportError, OSError):  # a home that may not be written
            import readline

            history_file().parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(history_file())

    def read(self) -> str:
        """The next question or command, perhaps of several lines."""
        while True:
            try:
                text = self._read_lines()
            except KeyboardInterrupt:
                print(flush=True)
                continue
            except EOFError:
                print(flush=True)
                raise
            except UnicodeDecodeError:
                say("That was not UTF-8 text: set your terminal to UTF-8.", style="yellow")
                continue
            if text.strip():
                return text

    def _read_lines(self) -> str:
        line = input(PROMPT)
        if line.lstrip().startswith(BLOCK):
            return self._read_block(line.lstrip().removeprefix(BLOCK))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            lines.append(input(CONTINUATION))
        return "\n".join(lines)

    def _read_block(self, first: str) -> str:
        """Up to a line that ends in three quotation marks. Never a command: it begins with a space."""
        lines = [first]
        while not lines[-1].rstrip().endswith(BLOCK):
            lines.append(input(CONTINUATION))
        lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
        return f" {chr(10).join(lines).strip()}"
