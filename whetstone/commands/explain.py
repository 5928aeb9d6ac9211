"""`whet explain`: diagnose a run from its files."""

import argparse

from whetstone.commands.parser import CommandParser

DESCRIPTION = """
Diagnose a run, finished or not, from its metrics. For each problem, most severe first: the evidence and the
setting to change. Reads files only.
"""
EXAMPLES = """
whet explain outputs/quickstart
"""


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("run_folder", metavar="RUN", help="the folder of a run")


def run(args: argparse.Namespace) -> None:
    from whetstone.diagnosis.explain import explain

    explain(args.run_folder)
