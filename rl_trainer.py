#!/usr/bin/env python3
"""The command line of the q project: programs in q, paid by their tests. `whet train q/...` does the work.

    python rl_trainer.py --model MY_SFT_CHECKPOINT --output_dir final_outputs/1.5b --learning_rate 2e-6
    torchrun --nproc_per_node=7 rl_trainer.py --model MY_SFT_CHECKPOINT --use_vllm --use_reasoning_format

Begins from config/q/1.5b.yaml, or config/q/14b.yaml with --use_reasoning_format; --config takes another. An
--output_dir is the folder of the run itself, as it was there.
"""

import sys

from train_grpo import to_whet
from whetstone.__main__ import main


def to_q(words: list[str]) -> list[str]:
    """The same command in whet's words, with a q recipe where none is named."""
    given = {word.removeprefix("--").partition("=")[0].replace("-", "_") for word in words}
    if given & {"h", "help"}:
        return ["train", "--help"]
    if "output_dir" in given and not given & {"run_name", "experiment_name"}:
        words = [*words, "run_name=null"]
    if not given & {"config", "config_path", "config_name"}:
        words = ["--config", "q/14b" if "use_reasoning_format" in given else "q/1.5b", *words]
    return to_whet(words)


if __name__ == "__main__":
    main(to_q(sys.argv[1:]))
