"""argparse for `whet`: errors are a `UserError` with a suggestion, and `key=value` settings are positional.

TRL's forms `--key value`, `--key=value` and `--switch` become `key=value` unless the command has that option.
"""

import argparse
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

from whetstone.errors import UserError, close_match

if TYPE_CHECKING:
    from whetstone.config import LoadedConfig

DEFAULT_RECIPE = "quickstart"
SOURCES = {
    "CONFIG": "a YAML file or the name of a shipped recipe",
    "DATA": "a file or a folder of rows, or the name of a data set",
    "RUN|CHECKPOINT|MODEL|CONFIG": "a run, a checkpoint, a model folder, a model's name; or a configuration",
}


class CommandParser(argparse.ArgumentParser):
    """The parser of one command."""

    accepts_settings = False

    def __init__(self, name: str, command: ModuleType) -> None:
        examples = "\n".join(f"  {line}" for line in command.EXAMPLES.strip().splitlines())
        super().__init__(
            prog=f"whet {name}",
            description=command.DESCRIPTION.strip(),
            epilog=f"examples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.example = examples.strip().splitlines()[0].split("   ")[0]
        command.add_arguments(self)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"`{self.prog}`: {message}. Example: `{self.example}`.")

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Parse the arguments after the command; `UserError` names what is wrong."""
        if self.accepts_settings:
            argv = self._settings_as_positionals(argv)
        has_remainder = any(action.nargs == argparse.REMAINDER for action in self._actions)
        parse = self.parse_known_args if has_remainder else self.parse_known_intermixed_args
        args, unknown = parse(argv)
        if unknown:
            self._reject(unknown[0])
        return args

    def _settings_as_positionals(self, argv: list[str]) -> list[str]:
        from whetstone.config.load import is_known_key

        result, rest = [], list(argv)
        while rest:
            argument = rest.pop(0)
            option, equals, _ = argument.partition("=")
            if not argument.startswith("--"):
                result.append(argument)
            elif (action := self._option_string_actions.get(option)) is not None:
                takes_value = action.nargs != 0
                result.append(f"{option}={rest.pop(0)}" if takes_value and not equals and rest else argument)
            elif option == "--":
                self._reject(argument)
            else:
                key = option[2:].replace("-", "_")
                if close_match(option, self._option_string_actions, cutoff=0.75) and not is_known_key(key):
                    self._reject(option)  # nearly one of the command's
                if equals:
                    result.append(key + argument[len(option) :])
                else:
                    has_value = bool(rest) and not rest[0].startswith("--") and "=" not in rest[0]
                    result.append(f"{key}={rest.pop(0) if has_value else 'true'}")
        return result

    def _reject(self, argument: str) -> NoReturn:
        if not argument.startswith("-"):
            raise UserError(f"`{self.prog}` does not take '{argument[:100]}'. Example: `{self.example}`.")
        option = argument.partition("=")[0][:100]
        match = close_match(option, self._option_string_actions)
        hint = f": did you mean '{match}'?" if match else "."
        raise UserError(f"`{self.prog}` has no option '{option}'{hint} `{self.prog} --help` lists them.")


def add_settings(parser: CommandParser, name: str = "CONFIG") -> None:
    """The positional arguments `[CONFIG] [key=value ...]`, and `--config FILE` for the first."""
    meaning = SOURCES.get(name, "the name of a task")
    parser.accepts_settings = True
    parser.add_argument("source", nargs="?", metavar=name, help=meaning)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings; they override the file")
    if name == "CONFIG":
        parser.add_argument("--config", metavar="FILE", help="the same as CONFIG")


def source_and_settings(args: argparse.Namespace) -> tuple[str | None, list[str]]:
    """CONFIG, None where the first argument is a setting; and the `key=value` settings."""
    source, settings = args.source, list(args.settings)
    config = getattr(args, "config", None)
    if source is not None and (config is not None or "=" in source):
        return config, [source, *settings]
    return source if config is None else config, settings


def load_config(args: argparse.Namespace, *extra: str, default: str = DEFAULT_RECIPE) -> "LoadedConfig":
    """The configuration that the arguments name; `UserError` where a package that it needs is missing."""
    from whetstone.config import load
    from whetstone.engines.packages import check_packages

    source, settings = source_and_settings(args)
    loaded = load(source or default, [*settings, *extra])
    check_packages(loaded.config)
    return loaded


def number(kind: type, least: int = 0) -> Callable[[str], float]:
    """An argparse type: a finite number of at least `least`."""

    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = -1
        if not least <= value < float("inf"):
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"'{text[:50]}' is not {what} of at least {least}")
        return value

    return convert
