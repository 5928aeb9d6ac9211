"""`whet profile`: run a few real steps of a configuration and show where their time goes."""

import argparse

from whetstone.commands.parser import (
    DEFAULT_RECIPE,
    CommandParser,
    add_settings,
    positive_int,
    source_and_settings,
)

SUMMARY = "profile a few steps: a trace and a summary"
DESCRIPTION = """
Run a few real steps of CONFIG: one to warm up, N timed, one under torch's profiler. No evaluation and no
checkpoint. The run folder gets a folder `profile`:

  profile.md      seconds, memory and tokens/s by stage; what they were spent on; what to try
  profile.png     the same as bars
  trace.json.gz   every operator and kernel, for ui.perfetto.dev
"""
EXAMPLES = """
whet profile quickstart
whet profile config/grpo.yaml micro_batch_tokens=32768 gradient_checkpointing=false
whet profile config/math.yaml --steps 4
"""


def add_arguments(parser: CommandParser) -> None:
    add_settings(parser)
    parser.add_argument("--steps", type=positive_int, default=2, metavar="N", help="timed steps (default: 2)")


def run(args: argparse.Namespace) -> None:
    from whetstone.config import load
    from whetstone.engines.packages import check_packages
    from whetstone.terminal.display import long_command

    source, settings = source_and_settings(args)
    with long_command():
        loaded = load(source or DEFAULT_RECIPE, settings)
        check_packages(loaded.config)
        from whetstone.commands.profile.profiler import profile

        profile(loaded, num_timed=args.steps)
