"""Checks of the user's reward functions before a run: their names, and an import in a separate process.

An import that fails, ends its process or never returns is reported at the start of a run. The process has a
time limit and is killed with everything that it started.
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

from whetstone.config import Config
from whetstone.config.plugins import check_object, is_plugin
from whetstone.errors import UserError, did_you_mean
from whetstone.rewards import custom
from whetstone.rewards.builtin import REWARDS

LONGEST_IMPORT_S = 120.0  # importing torch takes a while on a busy machine
_SUCCESS = "imported"
_REMEDY = "write def reward(completions, **columns)"


def check_reward_funcs(config: Config) -> None:
    """Raise on reward functions that cannot exist or have no effect. Imports nothing."""
    names = config.tasks.reward_funcs
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"reward_funcs names '{name}' twice: set its weight in reward_weights.")
        if name in REWARDS:
            REWARDS[name].check(config)
        elif is_plugin(name):
            check_object(name, "reward_funcs")
        else:
            known = f": write {', '.join(REWARDS)} or my_rewards.py:my_function."
            raise UserError(f"There is no reward function '{name}'{did_you_mean(name, REWARDS) or known}")


def verify(specs: Iterable[str], timeout_s: float = LONGEST_IMPORT_S) -> None:
    """Raise on a reward function that cannot be imported within the time limit."""
    for spec in specs:
        if spec not in REWARDS:
            check_object(spec, "reward_funcs")
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
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout_s)
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
        raise UserError(f"reward_funcs names '{spec}', whose parameters are unknown: {_REMEDY}.") from None
    takes_all = any(entry.kind is entry.VAR_KEYWORD for entry in parameters.values())
    positional_only = [name for name, entry in parameters.items() if entry.kind is entry.POSITIONAL_ONLY]
    if positional_only or not (parameters or takes_all):
        what = f"{positional_only[0]} can't be given by name" if positional_only else "it takes no arguments"
        raise UserError(f"reward_funcs names '{spec}', but {what}: {_REMEDY}.")
    if not (takes_all or custom.LISTS & set(parameters) or custom.text_parameter(parameters)):
        raise UserError(f"reward_funcs names '{spec}', which takes no completions: {_REMEDY}.")


if __name__ == "__main__":
    _import(sys.argv[1], Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # threads and exit handlers of the user's module are not waited for
