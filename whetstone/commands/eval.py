"""`whet eval`: evaluate a model or a checkpoint on fixed problems."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from whetstone.commands.parser import DEFAULT_RECIPE, add_settings, load_config, source_and_settings

DESCRIPTION = f"""
Evaluate checkpoint_path (default: the model itself) on the fixed evaluation problems of CONFIG.
Without CONFIG: the configuration of the run that checkpoint_path belongs to, or else {DEFAULT_RECIPE}.
"""
EXAMPLES = """
whet eval checkpoint_path=outputs/quickstart/final_model
whet eval config/multi_tasks.yaml checkpoint_path=outputs/multi_tasks/checkpoint-100
whet eval quickstart eval_samples_per_problem=8 eval_temperature=0.7
"""
add_arguments = add_settings


def run(args: argparse.Namespace) -> None:
    from whetstone.terminal.display import long_command
    from whetstone.terminal.stages import stage

    with long_command():
        recipe = recipe_of_checkpoint(source_and_settings(args)[1])
        loaded = load_config(args, "eval_only=true", default=recipe or DEFAULT_RECIPE)
        with stage("loading torch"):
            from whetstone.train import evaluate_only
        evaluate_only(loaded)


def recipe_of_checkpoint(settings: Iterable[str]) -> str | None:
    """The configuration file of the run that `checkpoint_path` belongs to; None where there is none."""
    from whetstone.config.overrides import parse_overrides

    path = parse_overrides(settings).get("checkpoint_path")
    config = Path(str(path)).parent / "config.yaml"
    return str(config) if path and config.is_file() else None
