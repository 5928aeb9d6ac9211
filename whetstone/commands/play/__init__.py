"""`whet play`: a person, or a player of ours, plays an environment as a model would."""

import argparse
import contextlib
from typing import TYPE_CHECKING

from whetstone.commands.parser import CommandParser, add_settings, number, source_and_settings
from whetstone.config import Config, load
from whetstone.config.overrides import parse_overrides
from whetstone.errors import UserError

if TYPE_CHECKING:
    from whetstone.commands.play.session import Session

DESCRIPTION = """
Play an environment, or any task, in the terminal: you see the prompt, say a turn, see the observation and, at
the end, the reward. Limits, tools, chat template and scoring are those of training; no model is loaded.
NAME is a task, my_env.py:MyEnv, or a configuration. key=value sets the task's own settings, or any key of
`whet config`.
A turn is a line. A line that ends in a backslash continues on the next one; three quotation marks begin and
end a turn of several lines, as in `whet chat`. Ctrl-D leaves. Piped input is read the same way.
"""
EXAMPLES = """
whet play wordle
whet play guess_number high=10 --seed 3 --raw
whet play maze_walk --player gold
whet play maze_walk --player random --episodes 200
whet play chain_sum 'tools=[calculator]'
whet play my_env.py:MyEnv
whet play guess
"""


def add_arguments(parser: CommandParser) -> None:
    add_settings(parser, "NAME")
    parser.add_argument("--seed", type=number(int), metavar="N", help="of the problems (default: 1)")
    parser.add_argument("--player", choices=("random", "gold"), help="watch a player instead of playing")
    parser.add_argument(
        "--episodes", type=number(int, 1), metavar="N", default=1, help="how many; from 2 on with an interval"
    )
    parser.add_argument(
        "--raw", action="store_true", help="show prompts as the model's chat template has them"
    )


def run(args: argparse.Namespace) -> None:
    name, settings = source_and_settings(args)
    if name is None:
        raise UserError("Name what to play: `whet play wordle`; `whet tasks` lists the tasks.")
    config = play_config(name, settings, args.seed)
    from whetstone.commands.play.session import open_session

    is_shown = args.player is None or args.episodes == 1
    with contextlib.ExitStack() as stack:
        session: Session = open_session(config, stack, player=args.player, raw=args.raw, is_shown=is_shown)
        session.play(args.episodes)


def play_config(name: str, settings: list[str], seed: int | None) -> Config:
    """The configuration of a task, or the one of that name."""
    from whetstone.commands.tasks import config_for_task
    from whetstone.config.plugins import is_plugin
    from whetstone.tasks.registry import task_class

    is_task = is_plugin(name)
    if not is_task and not name.endswith((".yaml", ".yml")):
        try:
            task_class(name)
            is_task = True
        except UserError:
            is_task = False
    config = config_for_task(name, parse_overrides(settings)) if is_task else load(name, settings).config
    only = {"reward_workers": 1} | ({} if seed is None else {"dataset_seed": seed})
    return config.model_copy(update={"tasks": config.tasks.model_copy(update=only)})
