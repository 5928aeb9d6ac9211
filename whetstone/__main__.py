"""`whet` and `python -m whetstone`: argv -> command -> exit code.

Exit codes: 0 success, 2 an error that the user can correct (one sentence, no traceback), 130 Ctrl-C. Any
other exception is a bug: exit code 1, with a traceback and where to report it.
"""

import importlib
import itertools
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from whetstone import __version__
from whetstone.commands import COMMANDS
from whetstone.commands.parser import DEFAULT_RECIPE, CommandParser
from whetstone.errors import UserError, did_you_mean
from whetstone.terminal.environment import check_working_directory, is_main_rank, sentence_of
from whetstone.terminal.streams import open_missing, steady_streams
from whetstone.terminal.text import escape_controls

BUG = (
    'whet: this is a bug. CONTRIBUTING.md, "Reporting a bug", says how to report it; send the lines above, '
    "and config.yaml, training.log and run.json of the run folder."
)
# Commands whose result is more than what they print: they succeed even where the output is lost.
WITH_RESULTS = ("init", "train", "sft", "eval", "profile", "compare", "serve", "launch", "export", "push")
WITH_FIRST_LINE = ("train", "sft", "eval", "profile", "compare", "serve", "doctor", "plan")


def main(argv: Sequence[str] | None = None) -> None:
    """The `whet` command; exits the process."""
    try:
        code = run(sys.argv[1:] if argv is None else list(argv))
    except Exception:
        traceback.print_exc()
        print(BUG, file=sys.stderr)
        code = 1
    sys.exit(code)


def run(argv: list[str]) -> int:
    """Run one command and return its exit code."""
    open_missing()
    lost: list[Exception] = []
    with steady_streams(lost.append):
        code = _run(argv)
    # `whet config | head` has done its work, and so has `whet train` on a full device.
    has_results = bool(argv) and argv[0] in WITH_RESULTS
    if code or not lost or isinstance(lost[0], BrokenPipeError) or has_results:
        return code
    return _print_error(f"The output could not be written ({lost[0]}): send it somewhere else.")


def import_command(name: str) -> ModuleType:
    """The module of a command; `UserError` for an unknown name."""
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS) or f". There are {', '.join(COMMANDS)}."
        raise UserError(f"There is no command '{name}'{hint}")
    return importlib.import_module(f"whetstone.commands.{name}")


def _run(argv: list[str]) -> int:
    try:
        check_working_directory()
        return _dispatch(argv)
    except UserError as error:
        return _print_error(str(error))
    except KeyboardInterrupt:
        if is_main_rank():
            print("whet: stopped.", file=sys.stderr)
        return 130
    except BaseException as error:
        sentence = sentence_of(error)
        if sentence is None:
            raise
        return _print_error(sentence)


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help") or argv == ["help"]:
        print(_overview())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"whetstone {__version__}")
        return 0
    name, *arguments = argv[1:] if argv[0] == "help" else argv
    wants_help = argv[0] == "help" or any(argument in ("-h", "--help") for argument in arguments)
    is_document = "--json" in arguments  # nothing else may be printed
    if name in WITH_FIRST_LINE and not (wants_help or is_document) and is_main_rank():
        print(escape_controls(_first_line(name, arguments)), flush=True)
    command = import_command(name)
    parser = CommandParser(name, command)
    if wants_help:
        print(parser.format_help(), end="")
        return 0
    if sys.platform not in ("linux", "darwin"):  # without fork and resource limits some import would raise
        raise UserError(f"This system ({sys.platform}) is not supported: use Linux, or WSL 2 under Windows.")
    return command.run(parser.parse(arguments)) or 0


def _first_line(name: str, arguments: list[str]) -> str:
    """Printed before anything heavy is imported."""
    secrets = {after for option, after in itertools.pairwise(arguments) if option == "--api-key"}
    named = [argument for argument in arguments if "=" not in argument and not argument.startswith("-")]
    named = [argument for argument in named if not argument.replace(".", "").isdecimal()]  # of an option
    named = [argument for argument in named if argument not in secrets]
    named += [argument for argument in arguments if argument.startswith("checkpoint_path=")]
    source = named[0] if named else DEFAULT_RECIPE if name != "doctor" else ""
    return f"whetstone {__version__}: {name} {source}".rstrip()


def _print_error(sentence: str) -> int:
    if is_main_rank():
        print(f"whet: {escape_controls(sentence)}", file=sys.stderr)
    return 2


def _overview() -> str:
    commands = [f"  {name:<12}{summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        [
            "usage: whet COMMAND [arguments]",
            "",
            "Reinforcement learning for language models on problems whose answers can be verified.",
            "",
            *commands,
            "",
            "`whet COMMAND --help` has the arguments and examples. `whet --version` prints the version.",
        ]
    )


if __name__ == "__main__":
    # `python -m` puts the working directory first: a `datasets.py` there would replace the package.
    if not sys.flags.safe_path and sys.path[0] != str(Path(__file__).parents[1]):
        sys.path.append(sys.path.pop(0))
    main()
