#!/usr/bin/env python3
"""The two commands people know from TRL-style projects, and `--key value` flags. `whet train` does the work.

    python train_grpo.py --config config/multi_tasks.yaml max_steps=100
    python train_grpo.py --config-path config --config-name grpo max_steps=100 report_to=none
    python train_grpo.py --model Qwen/Qwen2.5-1.5B-Instruct --learning_rate 2e-6 --use_wandb

Without a configuration it takes config/grpo.yaml.
"""

import sys
from pathlib import Path

from whetstone.__main__ import main

FLAGS = ("--config", "--config-path", "--config-name")


def to_whet(words: list[str]) -> list[str]:
    """The same command in whet's words: `train CONFIG key=value ...`."""
    if any(word in ("-h", "--help") for word in words):
        return ["train", "--help"]
    given: dict[str, str] = {}
    rest: list[str] = []
    words = list(words)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        if flag not in FLAGS:
            rest.append(word)
        elif equals or words:
            given[flag] = value if equals else words.pop(0)
        else:
            sys.exit(
                f"train_grpo.py: {flag} needs a value: a YAML file for --config, a folder for --config-path, "
                "the name of a recipe for --config-name."
            )
    if "--config" in given:
        return ["train", given["--config"], *rest]
    name = given.get("--config-name", "grpo")
    if "--config-path" not in given:
        return ["train", name, *rest]
    name = name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
    return ["train", str(Path(given["--config-path"]) / name), *rest]


if __name__ == "__main__":
    main(to_whet(sys.argv[1:]))
