"""Questions from the terminal: line editing, a history file, questions of several lines."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from whetstone.terminal.display import say

PROMPT, CONTINUATION = "> ", "... "
BLOCK = '"""'
HISTORY_LINES = 1000
INTERRUPT = "\x03"  # Ctrl-C


def history_file(name: str = "chat_history") -> Path:
    """In the user's state folder: $XDG_STATE_HOME, or ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "whetstone" / name


@contextlib.contextmanager
def interrupt_key() -> Iterator[None]:
    """Inside, Ctrl-C is a key and no signal: `input` misses a signal that comes outside its `select`."""
    import termios

    before = termios.tcgetattr(sys.stdin)
    changed = [*before[:6], list(before[6])]
    changed[6][termios.VINTR] = b"\0"
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, changed)  # what was typed already stays
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


class Reader:
    """`read` raises EOFError at Ctrl-D. Ctrl-C discards what was typed."""

    def __init__(self, history: str = "chat_history") -> None:
        self._history = history
        self._has_key = False  # whether Ctrl-C is a key of the line editor

    def __enter__(self) -> Self:
        with contextlib.suppress(ImportError, OSError):  # Python without readline; no history yet
            import readline

            if "libedit" not in (readline.__doc__ or "") and sys.stdin.isatty():
                # Ctrl-C adds itself to the line and ends it. `_input` keeps the history: not such lines.
                readline.parse_and_bind(r'"\C-c": "\C-v\C-c\C-m"')
                readline.set_auto_history(False)
                self._has_key = True
            readline.set_history_length(HISTORY_LINES)
            readline.read_history_file(history_file(self._history))
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ImportError, OSError):  # a home that may not be written
            import readline

            file = history_file(self._history)
            file.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(file)

    def read(self) -> str:
        """The next question or command, perhaps of several lines."""
        while True:
            try:
                text = self._read_lines()
            except KeyboardInterrupt:
                if not self._has_key:  # the line has not ended
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
        line = self._input(PROMPT)
        if line.lstrip().startswith(BLOCK):
            return self._read_block(line.lstrip().removeprefix(BLOCK))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            lines.append(self._input(CONTINUATION))
        return "\n".join(lines)

    def _input(self, prompt: str) -> str:
        if not self._has_key:
            return input(prompt)
        import readline

        with interrupt_key():
            line = input(prompt)
        if INTERRUPT in line:
            raise KeyboardInterrupt
        count = readline.get_current_history_length()
        if line and line != (readline.get_history_item(count) if count else None):
            readline.add_history(line)
        return line

    def _read_block(self, first: str) -> str:
        """Up to a line that ends in three quotation marks. Never a command: it begins with a space."""
        lines = [first]
        while not lines[-1].rstrip().endswith(BLOCK):
            lines.append(self._input(CONTINUATION))
        lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
        return f" {chr(10).join(lines).strip()}"
