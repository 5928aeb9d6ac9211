"""`whet completion`: a completion script with the commands, options, recipes and keys of this version."""

import argparse
import importlib
from dataclasses import dataclass

from whetstone.commands import COMMANDS
from whetstone.commands.parser import CommandParser

DESCRIPTION = """
Print a completion script for commands, options, shipped recipes and configuration keys. A file is read by
every new shell; make its folder first (mkdir -p). bash also needs the package bash-completion, and zsh a line
before compinit in ~/.zshrc: fpath=(~/.zfunc $fpath).
"""
EXAMPLES = """
source <(whet completion bash)                        this shell only
source <(whet completion zsh)                         this shell only, after compinit
whet completion fish | source                         this shell only
whet completion bash > ~/.local/share/bash-completion/completions/whet
whet completion zsh > ~/.zfunc/_whet
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
    return
  fi
  case "$command" in
{options}
  esac
  case "$command" in
    {"|".join(names.with_settings)}) candidates='{" ".join([*names.recipes, *names.keys])}' ;;
    completion) candidates='{" ".join(SCRIPTS)}' ;;
  esac
  local -a found=($(compgen -W "$options $candidates" -- "$current")) files=()
  local IFS=$'\n'
  [ "$command" = completion ] || files=($(compgen -f -- "$current"))
  if [ "${{#found[@]}}" -eq 0 ]; then compopt -o filenames; fi
  if [[ "${{found[*]}}" == *= ]]; then compopt -o nospace; fi
  COMPREPLY=("${{found[@]}}" "${{files[@]}}")
}}
complete -F _whet whet
"""


def zsh(names: Candidates) -> str:
    commands = "\n".join(f"    '{name}:{_plain(summary)}'" for name, summary in COMMANDS.items())
    options = "\n".join(f"    {name}) compadd -- {' '.join(o)} ;;" for name, o in names.options.items())
    return f"""#compdef whet
_whet() {{
  local -a commands=(
{commands}
  )
  if (( CURRENT == 2 )); then
    _describe command commands
    [[ $PREFIX == -* ]] && compadd -- --help --version
    return
  fi
  case $words[2] in
{options}
  esac
  case $words[2] in
    {"|".join(names.with_settings)})
      compadd -- {" ".join(names.recipes)}
      compadd -S '' -- {" ".join(names.keys)} ;;
    completion) compadd -- {" ".join(SCRIPTS)}; return ;;
  esac
  compset -P '*='
  _files
}}
if [ "$funcstack[1]" = "_whet" ]; then _whet "$@"; else compdef _whet whet; fi
"""


def fish(names: Candidates) -> str:
    lines = ["# whet completion for fish"]
    first, with_settings = "__fish_use_subcommand", " ".join(names.with_settings)
    lines += [f"complete -c whet -n {first} -l {flag}" for flag in ("help", "version")]
    for name, summary in COMMANDS.items():
        lines.append(f"complete -c whet -n {first} -f -a {name} -d '{_plain(summary)}'")
        for flag in names.options[name]:
            if flag.startswith("--"):
                lines.append(f"complete -c whet -n '__fish_seen_subcommand_from {name}' -l {flag[2:]}")
    seen = f"'__fish_seen_subcommand_from {with_settings}'"
    lines.append(f"complete -c whet -n {seen} -a '{' '.join([*names.recipes, *names.keys])}'")
    lines.append(f"complete -c whet -n '__fish_seen_subcommand_from completion' -f -a '{' '.join(SCRIPTS)}'")
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """Without what ends a single-quoted word of a shell."""
    return text.replace("'", "")


SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}
