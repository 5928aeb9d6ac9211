"""`whet compare`: train a grid of variants and seeds, and compare the results."""

import argparse
from pathlib import Path

from whetstone.commands.parser import CommandParser, add_settings, number, source_and_settings
from whetstone.errors import UserError

DESCRIPTION = """
Train CONFIG once for every combination of the keys that have several values, separated by commas. Other
settings hold for all runs. Lists in brackets and quoted text are one value. Results are means over seed.
variant="NAME: key=value key=value; NAME: ..." gives each variant its own settings.
The same command continues an interrupted comparison: finished runs are not repeated.
Writes table.md, results.json and compare.png into output_dir/compare (run_name=NAME: output_dir/NAME).
"""
EXAMPLES = """
whet compare quickstart loss_type=grpo,dapo,dr_grpo seed=1,2,3
whet compare quickstart learning_rate=1e-4,2e-4 beta=0,0.01 seed=1,2 max_steps=20 --jobs 2
whet compare quickstart variant="gspo: loss_type=gspo epsilon=3e-4; cispo: loss_type=cispo" seed=1,2,3
whet compare --table outputs/compare
"""


def add_arguments(parser: CommandParser) -> None:
    add_settings(parser)
    parser.add_argument("--jobs", type=number(int, 1), default=1, metavar="N", help="runs at the same time")
    parser.add_argument("--table", metavar="FOLDER", help="only write the table of an earlier comparison")


def run(args: argparse.Namespace) -> None:
    from whetstone.commands.compare.grid import compare, read_grid, write_table

    source, settings = source_and_settings(args)
    if args.table is not None:
        rest = [*([] if source is None else [source]), *settings]
        if rest:
            raise UserError(f"--table reads a folder and takes nothing else: leave out {' '.join(rest)}.")
        write_table(read_grid(Path(args.table)), failed={})
        return
    if source is None:
        raise UserError("Name a configuration first: `whet compare quickstart loss_type=grpo,dapo seed=1,2`.")
    compare(source, settings, jobs=args.jobs)
