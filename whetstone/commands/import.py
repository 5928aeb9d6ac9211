"""`whet import`: our YAML for a configuration of another project. Loads no torch."""

import argparse
import textwrap
from pathlib import Path

from whetstone.commands.config import yaml_value
from whetstone.commands.parser import CommandParser
from whetstone.config.foreign import import_file
from whetstone.config.tables import PROJECTS
from whetstone.errors import UserError
from whetstone.terminal.text import escape_controls

DESCRIPTION = """
Write a configuration of TRL, Unsloth, axolotl, verl, prime-rl or OpenRLHF as our YAML, keys with origins,
and what has no counterpart. FILE is YAML, TOML, a shell script, a Python file, a notebook; none is executed.
"""
EXAMPLES = """
whet import run_qwen2-7b.sh
whet import notebook.ipynb --from unsloth -o mine.yaml
"""


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="a configuration of another project")
    parser.add_argument("-o", "--output", metavar="OUT.yaml", type=Path, help="(default: the terminal)")
    parser.add_argument("--from", dest="project", choices=PROJECTS, help="(default: by its keys)")
    parser.add_argument("--force", action="store_true", help="write over a file that is there")


def run(args: argparse.Namespace) -> None:
    imported = import_file(args.file, args.project)
    settings, source = imported.settings(), f"{args.file.name} ({imported.project})"
    lines = [f"# {escape_controls(source)}, translated by `whet import`"]
    for key, value in settings.items():
        origins = " ".join(", ".join(dict.fromkeys(imported.origins[key])).split())
        lines.append(f"{key}: {yaml_value(value)}  # {escape_controls(origins)}")
    left = [f"{'; '.join(keys)} ({reason})" for reason, keys in imported.left.items()]
    for title, entries in (("Without a counterpart", left), ("What else differs", imported.differs)):
        lines += ["", f"# {title}:"] if entries else []
        for entry in entries:
            text = escape_controls(f"- {' '.join(entry.split())}")
            lines += textwrap.wrap(text, 110, initial_indent="# ", subsequent_indent="#   ")
    if args.output is None:
        print("\n".join(lines))
        return
    try:
        with args.output.open("w" if args.force else "x", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    except OSError as error:
        reason = f"{args.output} can't be written ({error.strerror})"
        raise UserError(f"{reason}: give another name, or --force to write over a file.") from None
    count = sum(map(len, imported.left.values()))
    print(f"{args.output}: {len(settings)} keys from {source}; {count} have no counterpart (see its end).")
