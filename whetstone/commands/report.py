"""`whet report`: write report.html of a run."""

import argparse

from whetstone.commands.parser import CommandParser

DESCRIPTION = """
Write report.html into a run folder, finished or not: curves, tasks, completions before and after.
"""
EXAMPLES = """
whet report outputs/quickstart
"""


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("run_folder", metavar="RUN", help="the folder of a run")


def run(args: argparse.Namespace) -> None:
    from whetstone.report import write_report

    print(f"The report is in {write_report(args.run_folder)}: open it in a browser.")
