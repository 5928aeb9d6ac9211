"""`whet completion`: a completion script with the commands, options, recipes and keys of this version."""

import argparse
import importlib
from dataclasses import dataclass

from whetstone.commands import COMMANDS
from whetstone.commands.parser import CommandParser

DESCRIPTION = """
Print a completion script for commands, options, shipped recipes and configuration keys.
"""
EXAMPLES = """
whet completion bash > ~/.local/share/bash-completion/completions/whet
source <(whet completion bash)                        this shell only
whet completion zsh > ~/.zfunc/_whet                  with ~/.zfunc in $fpath
whet completion fish > ~/.config/fish/completions/whet.fish
"""


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("shell", choices=tuple(SCRIPTS), help="which shell")


def run(args: argparse.Namespace) -> None:
    print(SCRIPTS[args.shell](candidates()), end="")


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """What may follow `whet`, and each of its commands."""

    options: dict[str, list[str]]  # command -> its options
    with_settings: list[str]  # commands that take CONFIG and key=value
    recipes: list[str]
    keys: list[str]


def candidates() -> Candidates:
    from whetstone.config.load import SECTION_OF, recipe_names

    modules = {name: importlib.import_module(f"whetstone.commands.{name}") for name in COMMANDS}
    parsers = {name: CommandParser(name, module) for name, module in modules.items()}
    return Candidates(
        options={name: [*parser._option_string_actions] for name, parser in parsers.items()},
        with_settings=[name for name, parser in parsers.items() if parser.accepts_settings],
        recipes=recipe_names(),
        keys=[f"{key}=" for key in SECTION_OF],
    )


def bash(names: Candidates) -> str:
    options = "\n".join(f"    {name}) options='{' '.join(o)}' ;;" for name, o in names.options.items())
    return f"""# whet completion for bash
_whet() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}" options= candidates=
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W '{" ".join(COMMANDS)} --help --version' -- "$current"))
    compopt +o nospace
    return
  fi
  case "$command" in
{options}
  esac
  case "$command" in
    {"|".join(names.with_settings)}) candidates='{" ".join([*names.recipes, *names.keys])}' ;;
    completion) candidates='{" ".join(SCRIPTS)}' ;;
  esac
  COMPREPLY=($(compgen -W "$options $candidates" -- "$current") $(compgen -f -- "$current"))
}}
complete -o nospace -F _whet whet
"""


def zsh(names: Candidates) -> str:
    commands = "\n".join(f"    '{name}:{_quote(summary)}'" for name, summary in COMMANDS.items())
    options = "\n".join(f"    {name}) compadd -- {' '.join(o)} ;;" for name, o in names.options.items())
    return f"""#compdef whet
_whet() {{
  local -a commands=(
{commands}
  )
  if (( CURRENT == 2 )); then
    _describe command commands
    return
  fi
  case $words[2] in
{options}
  esac
  case $words[2] in
    {"|".join(names.with_settings)})
      compadd -- {" ".join(names.recipes)}
      compadd -S '' -- {" ".join(names.keys)} ;;
    completion) compadd -- {" ".join(SCRIPTS)} ;;
  esac
  _files
}}
if [ "$funcstack[1]" = "_whet" ]; then _whet "$@"; else compdef _whet whet; fi
"""


def fish(names: Candidates) -> str:
    lines = ["# whet completion for fish"]
    first, with_settings = "__fish_use_subcommand", " ".join(names.with_settings)
    for name, summary in COMMANDS.items():
        lines.append(f"complete -c whet -n {first} -f -a {name} -d '{_quote(summary)}'")
        for flag in names.options[name]:
            if flag.startswith("--"):
                lines.append(f"complete -c whet -n '__fish_seen_subcommand_from {name}' -l {flag[2:]}")
    seen = f"'__fish_seen_subcommand_from {with_settings}'"
    lines.append(f"complete -c whet -n {seen} -a '{' '.join([*names.recipes, *names.keys])}'")
    lines.append(f"complete -c whet -n '__fish_seen_subcommand_from completion' -f -a '{' '.join(SCRIPTS)}'")
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    return text.replace("'", "").replace(":", r"\:")


SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}
