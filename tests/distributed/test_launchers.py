"""The commands of other projects that start several processes, with our scripts behind them: a run of
two ranks, whoever started it. Minutes with a busy machine, so they are slow tests.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "max_steps=1 num_generations=4 per_device_train_batch_size=4 max_completion_length=8 eval_num_samples=0 "
    "preflight=off"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        ["torch.distributed.run", "--standalone", "--nproc_per_node=2"],
        ["accelerate.commands.launch", "--multi_gpu", "--num-processes", "2"],
    ],
    ids=["torchrun", "accelerate"],
)
@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            "rl_trainer.py",
            "--model pebble --learning_rate 2e-6 --generation_temp .8 gradient_accumulation_steps=1 "
            "max_prompt_length=null datasets={code:\\ {config:\\ {path:\\ problems,\\ language:\\ python}}}",
        ),
        ("train_grpo.py", "--config config/countdown.yaml --model pebble max_steps=4 prompts_per_step=null"),
    ],
)
def test_two_ranks_by_any_launcher(tmp_path: Path, launcher: list[str], script: str, words: str) -> None:
    command = [sys.executable, "-m", *launcher, script, *TINY.split(), *shlex.split(words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, f"--output_dir={tmp_path}", "--run_name=r"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    log = (tmp_path / "r" / "training.log").read_text(encoding="utf-8")
    assert "2 ranks: weights in 2 shards" in log
    assert (tmp_path / "r" / "final_model" / "model.safetensors").is_file()
