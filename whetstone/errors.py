"""The one exception that is meant for a person.

`UserError` carries one clear sentence that names the thing and the remedy. The command line prints it without
a traceback and ends with exit code 2. Any other exception is a bug of ours and keeps its traceback.
"""


class UserError(ValueError):
    """Something the user gave cannot work; the message says what and what to do."""
