"""training.log and the terminal: where the messages of a run go, and the sentence that ends it.

Messages of transformers and the hub client go to the file alone. Control characters are written out in both.
"""

import contextlib
import logging
import os
import traceback
from pathlib import Path
from types import TracebackType

import rich

from whetstone.errors import UserError
from whetstone.files import explain_disk_errors
from whetstone.terminal.display import say
from whetstone.terminal.streams import tell_log
from whetstone.terminal.text import escape_controls

logger = logging.getLogger("whetstone")

STEP_LINES = "whetstone.steps"  # for the file only: progress and evaluations show themselves
LIBRARIES = ("transformers", "huggingface_hub", "httpx", "datasets", "accelerate", "peft")


def setup_logging(
    run_folder: str | os.PathLike[str], *, is_main: bool = True, name: str = "training.log"
) -> logging.Logger:
    """Send the log to the file `name` (appended, with times) and, on the main rank, to the terminal."""
    console = rich.get_console()
    console.quiet = not is_main
    console.is_jupyter = False  # a notebook would get an output of its own, in HTML, for every line
    folder = Path(run_folder)
    folder.mkdir(parents=True, exist_ok=True)
    for handler in [*logger.handlers]:
        logger.removeHandler(handler)
        handler.close()
    with explain_disk_errors(folder / name):
        file = _FileHandler(folder / name, encoding="utf-8")
    file.setFormatter(_Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    logger.addHandler(file)
    logger.addHandler(_TerminalHandler())
    logger.setLevel(logging.INFO)
    for library in map(logging.getLogger, LIBRARIES):  # to our file instead of the terminal
        for handler in [*library.handlers]:
            if type(handler) in (logging.StreamHandler, _FileHandler):
                library.removeHandler(handler)
        library.addHandler(file)
        library.propagate = False
    tell_log()
    return logger


def log_ending(
    kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    """The sentence that ends a run, into its log; as a callback of an ExitStack (`stack.push`)."""
    ending = logging.getLogger(STEP_LINES)
    if isinstance(error, UserError):
        ending.error("%s", error)
    elif isinstance(error, KeyboardInterrupt):
        ending.info("Stopped by Ctrl-C or SIGTERM.")
    elif isinstance(error, GeneratorExit):
        ending.info("The loop over whetstone.steps was left.")
    elif isinstance(error, SystemExit):
        ending.error("Ended with exit code %s.", error.code)
    elif error is not None:
        ending.error("%s", "".join(traceback.format_exception(kind, error, trace)).rstrip())


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(super().format(record))


class _FileHandler(logging.FileHandler):
    """A log that cannot be written is not worth a traceback: metrics.jsonl lies beside it and says why."""

    def handleError(self, record: logging.LogRecord) -> None: ...

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


class _TerminalHandler(logging.Handler):
    """Prints through rich's own console, so that lines go above the live line and not through it."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == STEP_LINES:
            return
        style = {logging.WARNING: "yellow", logging.ERROR: "bold red"}.get(record.levelno)
        try:
            say(self.format(record), style=style)
        except Exception:  # logging's rule: a message that cannot be shown never stops the program
            self.handleError(record)
