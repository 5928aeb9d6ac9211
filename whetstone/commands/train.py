"""`whet train`: load the configuration, then run the training loop."""

import argparse
import os

from whetstone.commands.parser import DEFAULT_RECIPE, add_settings, load_config

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
add_arguments = add_settings


def run(args: argparse.Namespace) -> None:
    from whetstone.terminal.display import long_command, say
    from whetstone.terminal.environment import is_main_rank
    from whetstone.terminal.stages import stage

    with long_command():
        loaded = load_config(args)
        if is_main_rank() and not loaded.config.evaluation.eval_only:
            say(f"run folder: {os.path.join(loaded.config.run.output_dir, loaded.config.run.run_name or '')}")
        with stage("loading torch"):
            from whetstone.train import train
        train(loaded)
