"""`UserError`: an error that the user can correct, and the suggestions that its message makes.

Its message is one sentence with the remedy. The command line prints it without a traceback and exits with
code 2. Any other exception is a bug and keeps its traceback.
"""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """The user's input cannot work; the message says what is wrong and what to do."""


def close_match(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that is spelled most like `name`; None where none is near."""
    matches = difflib.get_close_matches(name[:200], list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`: did you mean 'X'?`, or an empty text."""
    match = close_match(name, known)
    return f": did you mean '{match}'?" if match else ""


def message_of(error: BaseException) -> str:
    """The type and the message of an error of somebody else's code, whose `__str__` may fail as well."""
    try:
        text = str(error)
    except Exception:
        text = "its message can't be read"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
