"""Import the user's reward functions in a process of its own, before anything is loaded.

An import that fails, ends its process or never returns is found at the start of a run and not in its middle.
The process gets a time limit and is ended with all that it started. Scores nothing.
"""

import contextlib
import inspect
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from whetstone.errors import UserError
from whetstone.rewards import custom
from whetstone.rewards.combine import BUILT_IN

LONGEST_IMPORT_S = 120.0  # importing torch takes a while on a busy machine
_SUCCESS = "imported"


def verify(specs: Iterable[str], timeout_s: float = LONGEST_IMPORT_S) -> None:
    """Complain about a reward function that can't be imported within the time limit; built-in ones need no
    import.
    """
    for spec in specs:
        if spec not in BUILT_IN:
            custom.check(spec)
            _verify(spec, timeout_s)


def _verify(spec: str, timeout_s: float) -> None:
    with tempfile.TemporaryDirectory(prefix="whetstone-verify-") as folder:
        result_file = Path(folder) / "result"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "whetstone.rewards.verify", spec, str(result_file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        code = None
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # also what it has started
            process.wait()
        message = result_file.read_text(encoding="utf-8", errors="replace") if result_file.is_file() else ""
    if code is None:
        raise UserError(
            f"Importing the reward function '{spec}' took longer than {timeout_s:g} s: let its file define "
            "functions only, and do slow work at the first call."
        )
    if message == _SUCCESS:
        return
    raise UserError(
        message
        or f"Importing the reward function '{spec}' ended the process (exit code {code}): let its file "
        "define functions only."
    )


def _import(spec: str, result_file: Path) -> None:
    """In the process of its own: import, and write down how it went."""
    try:
        function = custom.load(spec)
        _check_parameters(function, spec)
        message = _SUCCESS
    except UserError as error:
        message = str(error)
    result_file.write_text(message, encoding="utf-8", errors="replace")


def _check_parameters(function: object, spec: str) -> None:
    try:
        parameters = inspect.signature(function).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise UserError(
            f"reward_funcs names '{spec}', whose parameters can't be seen: wrap it in a function, "
            "def reward(completions, **columns)."
        ) from None
    takes_all = any(entry.kind is entry.VAR_KEYWORD for entry in parameters.values())
    positional_only = [name for name, entry in parameters.items() if entry.kind is entry.POSITIONAL_ONLY]
    if positional_only or not (parameters or takes_all):
        what = f"{positional_only[0]} can't be given by name" if positional_only else "it takes no arguments"
        raise UserError(f"reward_funcs names '{spec}', but {what}: write def reward(completions, **columns).")


if __name__ == "__main__":
    _import(sys.argv[1], Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # threads and exit handlers of the user's module are not waited for
