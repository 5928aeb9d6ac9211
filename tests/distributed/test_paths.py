"""Whole runs by several ranks beside the same runs by one process, and resumed by other numbers of ranks.

With WHETSTONE_TEST_DEVICE=cuda all ranks share one GPU and talk over NCCL, otherwise over gloo on CPUs. Each
number of ranks starts once and trains every run after the other, since starting takes longest.
`python -m tests.distributed.test_paths` prints the table of docs/lab/scale.md.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import free_port, run_on
from tests.environments import waiting
from tests.support.models import write_tiny
from tests.support.ranks import DEVICE
from tests.support.runs import rows, run, weights
from whetstone.files import atomic_write
from whetstone.run.checkpoint import complete_checkpoints

Settings = dict[str, Any]
BASE: Settings = {
    "device": DEVICE.type,
    "prompts_per_step": 4,
    "max_steps": 3,
    "save_steps": 2,
    "max_completion_length": 24,
    "eval_num_samples": 4,
    "log_completions_steps": 1,
    "adam_epsilon": 1e-6,  # gradients that are only rounding must not become steps of full size
    "heartbeat_timeout_s": 120,
}
GUESS: Settings = {
    "datasets": f"{{{waiting.__file__}:SlowGuess: {{config: {{high: 5, max_guesses: 3}}}}}}",
    "max_turns": 3,
    "full_determinism": True,
}
AGENT = Path(__file__).with_name("asks_twice.py")
LEVELS = "{chain_sum: {curriculum: {up: 0.1, down: 0.0, window: 8}}}"
CRITIC: Settings = {"advantage": "gae", "critic": "model", "critic_learning_rate": 1e-3}
MOVING: Settings = {"beta": 0.1, "kl_reference": "moving", "ref_model_sync_steps": 1}
LORA: Settings = {"use_peft": True, "lora_r": 8}
PATHS: dict[int, dict[str, Settings]] = {
    2: {
        "FSDP2": {},
        "TP": {"tp_size": 2},
        "TP, sequence parallel": {"tp_size": 2, "sequence_parallel": True},
        "replicas": {"ddp_size": 2},
        "LoRA": LORA,
        "LoRA, TP": {**LORA, "tp_size": 2},
        "offloaded states": {"optim": "adamw_8bit", "cpu_offload": "optimizer"},
        "offloaded weights": {"cpu_offload": "all"},
        "critic of its own": CRITIC,
        "moving reference": MOVING,
        "gradient checkpointing": {"gradient_checkpointing": True, "micro_batch_tokens": 200},
        "dynamic sampling": {"dynamic_sampling": True, "dynamic_sampling_max_rounds": 2},
        "curriculum": {"datasets": LEVELS},
        "episodes": GUESS,
        "episodes, TP": {**GUESS, "tp_size": 2},
        "agents": {"agent": f"{AGENT}:twice", "max_turns": 3, "reward_funcs": f"[{AGENT}:spread]"},
        "mixture of experts": {"model_name_or_path": "qwen3_moe", "reward_funcs": f"[{AGENT}:spread]"},
    },
    4: {
        "FSDP2 on four": {},
        "FSDP2 x TP": {"tp_size": 2},
        "FSDP2 x 2 replicas": {"ddp_size": 2},
        "TP x 2 replicas, LoRA": {"ddp_size": 2, "tp_size": 2, **LORA},
    },
}
# 8-bit states round by blocks of the own part of a rank; LoRA factors that begin as zeros are small.
LIMITS = dict.fromkeys(["offloaded states", "LoRA, TP", "TP x 2 replicas, LoRA"], 3e-3)
if DEVICE.type == "cuda":
    BASE["full_determinism"] = True  # resume is bit-exact without it on CPUs only
    PATHS[2]["compiled layers"] = {"torch_compile": True}
    PATHS[2]["mixture of experts"]["bf16"] = True  # torch's grouped product of float32 can't be captured
    LIMITS["mixture of experts"] = 5e-2
# Runs whose checkpoints are resumed by these numbers of ranks, the settings as they were.
RESUMED = {
    1: ["FSDP2", "LoRA", "critic of its own", "moving reference", "offloaded states"],
    2: [name for name in PATHS[2] if name != "agents"],  # agents are not resumed bit for bit
    4: ["FSDP2", "TP", "LoRA", "critic of its own"],
}


def settings_of(name: str, folder: Path) -> Settings:
    given = next(paths[name] for paths in PATHS.values() if name in paths)
    if given.get("model_name_or_path") == "qwen3_moe":
        given = {**given, "model_name_or_path": folder / "qwen3_moe"}
    return {**BASE, **given}


def train_all(folder: Path, names: list[str], num_ranks: int, resume: bool) -> None:
    """What each rank does: the runs of these names, below `folder`/`num_ranks`."""
    for name in names:
        os.environ["MASTER_PORT"] = agreed_port(place(folder, name, num_ranks, resume).with_suffix(".port"))
        settings = settings_of(name, folder)
        if num_ranks == 1:
            settings |= {"tp_size": 1, "ddp_size": 1, "sequence_parallel": False}
        if resume:
            settings["auto_resume"] = True
        began = time.monotonic()
        run(place(folder, name, num_ranks, resume), **settings)
        if int(os.environ["RANK"]) == 0:
            print(f"{num_ranks} ranks: {name}: {time.monotonic() - began:.1f} s", flush=True)


def agreed_port(file: Path) -> str:
    """A port that is free now: the first rank writes it to `file`."""
    if int(os.environ["RANK"]) == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(file, str(free_port()))
    while not file.exists():
        time.sleep(0.01)
    return file.read_text()


def place(folder: Path, name: str, num_ranks: int, resume: bool) -> Path:
    return folder / ("resumed" if resume else "whole") / str(num_ranks) / name.replace(" ", "_")


def start(folder: Path, names: Iterable[str], num_ranks: int, *, resume: bool = False) -> None:
    names = list(names)
    run_on(num_ranks, train_all, folder, names, num_ranks, resume, timeout_s=60.0 + 60 * len(names))


def cut(folder: Path, name: str, saved_by: int, num_ranks: int) -> None:
    """A copy of a run as it was after step 2."""
    copy = place(folder, name, num_ranks, resume=True)
    shutil.copytree(place(folder, name, saved_by, resume=False), copy)
    for lost in ("final_model", "checkpoint-3"):
        shutil.rmtree(copy / "run" / lost)
    assert [found.step for found in complete_checkpoints(copy / "run")] == [2]


def apart(one: Path, other: Path) -> tuple[float, float]:
    """The largest relative differences of metrics and of weights of two runs."""
    mine, theirs = rows(one, "train"), rows(other, "train")
    assert len(mine) == len(theirs) == BASE["max_steps"]
    own = ("memory", "micro_batch_tokens")  # of one rank
    keys = [key for key in theirs[0] if isinstance(theirs[0][key], float) and not key.startswith(own)]
    metrics = max(
        abs(a.get(key, 0.0) - b[key]) / max(abs(b[key]), 1e-2)
        for a, b in zip(mine, theirs, strict=True)
        for key in keys
        if key in b
    )
    ours, whole = (weights(folder / "run" / "final_model") for folder in (one, other))
    assert ours.keys() == whole.keys()
    return metrics, max(
        (
            (ours[name].float() - whole[name].float()).norm() / whole[name].float().norm().clamp(min=1e-12)
        ).item()
        for name in whole
    )


def same_completions(one: Path, other: Path) -> float:
    """The share of all steps' completions that are the same text."""
    texts = [
        [
            json.loads(line)["completion"]
            for step in range(1, BASE["max_steps"] + 1)
            for line in (folder / "run" / "completions" / f"step_{step}.jsonl").read_text().splitlines()
        ]
        for folder in (one, other)
    ]
    return sum(mine == theirs for mine, theirs in zip(*texts, strict=True)) / len(texts[0])


def everything(folder: Path, numbers: Iterable[int]) -> None:
    """All runs, by these numbers of ranks and by one process, and resumed."""
    write_tiny("qwen3_moe", folder / "qwen3_moe")
    whole = [name for number in numbers for name in PATHS[number]]
    for number in numbers:
        start(folder, PATHS[number], number)
    start(folder, whole, 1)
    for number in (1, *numbers):
        for name in RESUMED[number]:
            cut(folder, name, 2, number)
        start(folder, RESUMED[number], number, resume=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("paths")
    everything(folder, PATHS)
    return folder


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("num_ranks", "name"), [(number, name) for number in PATHS for name in PATHS[number]]
)
def test_ranks_train_what_one_process_does(folder: Path, num_ranks: int, name: str) -> None:
    mine, alone = place(folder, name, num_ranks, False), place(folder, name, 1, False)
    assert same_completions(mine, alone) >= (0.9 if name in LIMITS else 1.0)
    metrics, differs = apart(mine, alone)
    assert metrics < LIMITS.get(name, 1e-3) and differs < LIMITS.get(name, 1e-4), (metrics, differs)


@pytest.mark.ranks
@pytest.mark.parametrize(("num_ranks", "name"), [(n, name) for n, names in RESUMED.items() for name in names])
def test_a_checkpoint_is_resumed_by_any_number_of_ranks(folder: Path, num_ranks: int, name: str) -> None:
    """Bit for bit by as many ranks as before."""
    metrics, differs = apart(place(folder, name, num_ranks, True), place(folder, name, 2, False))
    if num_ranks == 2:
        assert (metrics, differs) == (0.0, 0.0)
    else:
        assert metrics < 1e-3 and differs < LIMITS.get(name, 1e-5), (metrics, differs)


def main(folder: Path) -> None:
    everything(folder, PATHS)
    print(f"| {DEVICE.type}, ranks | path | same completions | metrics | weights |\n|---|---|---|---|---|")
    for number, paths in PATHS.items():
        for name in paths:
            pair = place(folder, name, number, False), place(folder, name, 1, False)
            metrics, differs = apart(*pair)
            print(f"| {number} | {name} | {same_completions(*pair):.1%} | {metrics:.1e} | {differs:.1e} |")
    for number, names in RESUMED.items():
        for name in names:
            pair = place(folder, name, number, True), place(folder, name, 2, False)
            metrics, differs = apart(*pair)
            same = same_completions(*pair)
            print(f"| 2, resumed by {number} | {name} | {same:.1%} | {metrics:.1e} | {differs:.1e} |")


if __name__ == "__main__":
    torch.multiprocessing.set_start_method("forkserver", force=True)
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else scratch))
