"""`whet profile`: run a few real steps of a configuration and show where their time goes."""

import argparse

from whetstone.commands.parser import CommandParser, add_settings, load_config, number

DESCRIPTION = """
Run a few real steps of CONFIG: one to warm up, N timed, one under torch's profiler. No evaluation and no
checkpoint. The run folder gets a folder `profile`:

  profile.md      seconds, memory and tokens/s by stage; what they were spent on; what to try
  trace.json.gz   every operator and kernel, for ui.perfetto.dev
"""
EXAMPLES = """
whet profile quickstart
whet profile config/grpo.yaml micro_batch_tokens=32768 gradient_checkpointing=false
whet profile config/math.yaml --steps 4
"""


def add_arguments(parser: CommandParser) -> None:
    add_settings(parser)
    steps = "timed steps (default: 2)"
    parser.add_argument("--steps", type=number(int, 1), default=2, metavar="N", help=steps)


def run(args: argparse.Namespace) -> None:
    from whetstone.terminal.display import long_command

    with long_command():
        loaded = load_config(args)
        from whetstone.commands.profile.profiler import profile

        profile(loaded, num_timed=args.steps)
