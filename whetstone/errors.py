"""The one exception that is meant for a person.

`UserError` carries one clear sentence that names the thing and the remedy. The command line prints it without
a traceback and ends with exit code 2. Any other exception is a bug of ours and keeps its traceback.
"""


class UserError(ValueError):
    """Something the user gave cannot work; the message says what and what to do."""


def message_of(error: BaseException) -> str:
    """The type and the message of an error of somebody else's code, whose `__str__` may fail as well."""
    try:
        text = str(error)
    except Exception:
        text = "its message can't be read"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
