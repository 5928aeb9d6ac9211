#!/usr/bin/env python3
"""The command line of the q project: programs in q, paid by their tests. `whet train q/...` does the work.

    python rl_trainer.py --model MY_SFT_CHECKPOINT --output_dir final_outputs/1.5b --learning_rate 2e-6
    torchrun --nproc_per_node=7 rl_trainer.py --model MY_SFT_CHECKPOINT --use_vllm --use_reasoning_format

Any key of the configuration is a flag (`whet config` lists them). Those of the project:
  --model PATH                     the model to begin from: a folder or a name
  --use_reasoning_format           <reasoning>...</reasoning><answer>...</answer> around the program
  --learning_rate, --generation_temp, --eval_steps, --simple_eval_problems, --repeat_eval_problems
  --base_reward_weight, --perfect_reward_weight, --max_tests_per_problem
  --use_vllm, --max_model_len      sample by vLLM; tokens of a prompt and its completion
  --use_wandb, --wandb_name, --wandb_project
  --output_dir FOLDER              the folder of the run itself, with links named as they were there
  --config FILE                    a recipe (q/7b, q/14b ...) in place of q/1.5b; a file without a data set
                                   changes q/1.5b
"""

import contextlib
import json
import os
import sys
from pathlib import Path

from train_grpo import to_whet
from whetstone.__main__ import main
from whetstone.config import find, load
from whetstone.config.data_keys import SETTINGS
from whetstone.config.yaml_text import read_yaml
from whetstone.errors import UserError

RECIPE = "q/1.5b"


def to_q(words: list[str]) -> list[str]:
    """The same command in whet's words, with a q recipe where none is named."""
    given = {word.removeprefix("--").partition("=")[0].replace("-", "_") for word in words}
    if "output_dir" in given and not given & {"run_name", "experiment_name"}:
        words = [*words, "run_name=null"]
    if not given & {"config", "config_path", "config_name"}:
        words = ["--config", RECIPE, *words]
    verb, source, *rest = to_whet(words)
    try:
        flat = read_yaml(find(source))
    except UserError:  # `whet train` says it
        return [verb, source, *rest]
    if {"datasets", "data", *SETTINGS} & set(flat):
        return [verb, source, *rest]
    return [verb, RECIPE, *(f"{key}={json.dumps(value)}" for key, value in flat.items()), *rest]


def link_outputs(folder: Path) -> None:
    """The files of a run under the names that the project's README gives them."""
    results = sorted(folder.glob("eval_results/eval_step_*.json"), key=lambda path: path.stat().st_mtime)
    links = {f"checkpoints/{path.name}": path for path in folder.glob("checkpoint-*")}
    links["logs/training_log.txt"] = folder / "training.log"
    if results:
        links["logs/eval_results.json"] = results[-1]
    for old in folder.glob("checkpoints/*"):  # save_total_limit may have removed some
        if not old.exists():
            old.unlink()
    for name, target in links.items():
        link = folder / name
        if target.exists() and (link.is_symlink() or not link.exists()):
            link.parent.mkdir(exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(target, link.parent))


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.exit(print(__doc__))
    command = to_q(sys.argv[1:])
    try:
        main(command)
    finally:
        if int(os.environ.get("RANK", "0")) == 0:
            with contextlib.suppress(UserError):  # it has been printed
                run = load(command[1], command[2:]).config.run
                link_outputs(Path(run.output_dir) / (run.run_name or ""))
