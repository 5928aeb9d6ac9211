"""`whet train`: load the configuration, then run the training loop."""

import argparse
import os

from whetstone.commands.parser import DEFAULT_RECIPE, CommandParser, add_settings, source_and_settings

SUMMARY = "train a model"
DESCRIPTION = f"""
Train with CONFIG: a YAML file or the name of a shipped recipe (default: {DEFAULT_RECIPE}).
key=value settings override the file; `--key value` is accepted too. `whet config` lists the keys.
A dotted key sets an entry of a mapping: datasets.math.config.answer_column=solution.
"""
EXAMPLES = """
whet train
whet train quickstart max_steps=10 learning_rate=3e-4
whet train config/multi_tasks.yaml use_peft=true report_to=wandb
whet train config/grpo.yaml auto_resume=true          resume from the last checkpoint
"""


def add_arguments(parser: CommandParser) -> None:
    add_settings(parser)


def run(args: argparse.Namespace) -> None:
    run_settings(*source_and_settings(args))


def run_settings(source: str | None, settings: list[str]) -> None:
    """Load a configuration and train."""
    from whetstone.terminal.display import long_command, say

    source = source or DEFAULT_RECIPE
    with long_command():
        from whetstone.config import load
        from whetstone.engines.packages import check_packages
        from whetstone.terminal.environment import is_main_rank
        from whetstone.terminal.stages import stage

        loaded = load(source, settings)
        check_packages(loaded.config)
        if is_main_rank() and not loaded.config.evaluation.eval_only:
            say(f"run folder: {os.path.join(loaded.config.run.output_dir, loaded.config.run.run_name or '')}")
        with stage("loading torch"):
            from whetstone.train import train
        train(loaded)
