"""`whet sft`: supervised fine-tuning on the solutions of the tasks, by the same loop as `whet train`."""

import argparse

from whetstone.commands import train
from whetstone.commands.parser import DEFAULT_RECIPE, add_settings, source_and_settings

DESCRIPTION = """
Fine-tune on solutions with CONFIG: a YAML file or the name of a shipped recipe, as for `whet train`.
Rows bring a solution (columns messages, completion or solution); other tasks imitate their own answers.
The loss is the negative log-likelihood of the completion. The evaluation is the one of `whet train`.
Defaults: run_name=sft, num_train_epochs=1, learning_rate=1e-5 (with LoRA 1e-4); the file may set others.
rejection_sampling=true trains on correct completions of the model itself.
"""
EXAMPLES = """
whet sft math data_path=rows.jsonl
whet sft my_rows.yaml use_peft=true num_train_epochs=2
whet train my_rows.yaml model_name_or_path=outputs/sft/final_model
whet sft config/gsm8k.yaml rejection_sampling=true
"""


add_arguments = add_settings


def run(args: argparse.Namespace) -> None:
    source, settings = source_and_settings(args)
    source = source or DEFAULT_RECIPE
    args.config, args.source, args.settings = None, source, supervised(source, settings)
    train.run(args)


def supervised(source: str, settings: list[str]) -> list[str]:
    """The settings of a supervised run: those of the user after the defaults."""
    from whetstone.config import load

    defaults = ["loss_type=sft", "run_name=sft", "sft_steps=0"]
    loaded = load(source, [*defaults, *settings])
    if "learning_rate" not in loaded.origins:
        defaults.append(f"learning_rate={1e-4 if loaded.config.model.use_peft else 1e-5}")
    return [*defaults, *settings]
