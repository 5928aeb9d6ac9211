"""Short runs of the embedded model, and what they leave behind."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.torture.compare import TIMED
from whetstone.config import load
from whetstone.train import train

# One short task, few tokens: a step takes about a second on two cores.
SMALL = {
    "model_name_or_path": "pebble",
    "datasets": "{chain_sum: {config: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 2}}}",
    "reward_funcs": "[accuracy]",
    "prompts_per_step": 2,
    "num_generations": 4,
    "max_completion_length": 32,
    "learning_rate": 1e-3,
    "max_steps": 4,
    "eval_num_samples": 6,
    "eval_greedy": False,
    "eval_num_examples_to_print": 0,
    "log_completions_steps": 2,
    "save_steps": 2,
    "reward_workers": 1,
    "preflight": "off",  # tests/run/test_preflight.py is about it
}


def words(folder, **changes):
    return [
        f"{key}={value}"
        for key, value in {**SMALL, "output_dir": folder, "run_name": "run", **changes}.items()
    ]


def run(folder, **changes):
    return train(load(None, words(folder, **changes)))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = list(folder.glob("*.safetensors"))
    return load_file(file)


def rows(folder: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if not key.startswith(TIMED)}
        for line in lines
        if line["kind"] == kind
    ]


def whet(*arguments, **options):
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "whetstone", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, **options
    )


def wait_for(process, word, timeout_s=120):
    seen = []
    begun = time.monotonic()
    while time.monotonic() - begun < timeout_s:
        line = process.stdout.readline()
        if not line:
            break
        seen.append(line)
        if word in line:
            return
    raise AssertionError(f"'{word}' never came:\n{''.join(seen)}")
