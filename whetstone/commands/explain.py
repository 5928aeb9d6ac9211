"""`whet explain`: diagnose a run from its files."""

import argparse

from whetstone.commands.parser import CommandParser

SUMMARY = "diagnose a run: why the loss is 0, the reward is flat, or the run collapsed"
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
