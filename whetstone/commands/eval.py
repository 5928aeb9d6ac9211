"""`whet eval`: evaluate a model or a checkpoint on fixed problems."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from whetstone.commands.parser import DEFAULT_RECIPE, CommandParser, add_settings, source_and_settings

SUMMARY = "evaluate a model or a checkpoint"
DESCRIPTION = f"""
Evaluate checkpoint_path (default: the model itself) on the fixed evaluation problems of CONFIG.
Without CONFIG: the configuration of the run that checkpoint_path belongs to, or else {DEFAULT_RECIPE}.
"""
EXAMPLES = """
whet eval checkpoint_path=outputs/quickstart/final_model
whet eval config/multi_tasks.yaml checkpoint_path=outputs/multi_tasks/checkpoint-100
whet eval quickstart eval_samples_per_problem=8 eval_temperature=0.7
"""


def add_arguments(parser: CommandParser) -> None:
    add_settings(parser)


def run(args: argparse.Namespace) -> None:
    from whetstone.terminal.display import long_command

    source, settings = source_and_settings(args)
    with long_command():
        from whetstone.config import load
        from whetstone.engines.packages import check_packages
        from whetstone.terminal.stages import stage

        source = source or recipe_of_checkpoint(settings) or DEFAULT_RECIPE
        loaded = load(source, [*settings, "eval_only=true"])
        check_packages(loaded.config)
        with stage("loading torch"):
            from whetstone.train import evaluate_only
        evaluate_only(loaded)


def recipe_of_checkpoint(settings: Iterable[str]) -> str | None:
    """The configuration file of the run that `checkpoint_path` belongs to; None where there is none."""
    from whetstone.config.overrides import parse_overrides

    path = parse_overrides(settings).get("checkpoint_path")
    config = Path(str(path)).parent / "config.yaml"
    return str(config) if path and config.is_file() else None
