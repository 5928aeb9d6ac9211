"""Every shipped recipe trains: two steps of each with the embedded model, with smaller sizes."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from whetstone import __main__ as cli
from whetstone.config import load

CONFIG = Path(__file__).resolve().parents[2] / "config"
RECIPES = sorted(path.relative_to(CONFIG).with_suffix("") for path in CONFIG.rglob("*.yaml"))
NOT_RECIPES = {"zero3"}  # settings of accelerate
BRIEF = "Answer in <answer> tags."
# What a recipe needs beside the embedded model. The q recipes train Klong in q's place: no q can be had here.
OWN = {
    "countdown": {"steps_per_generation": 2},
    "dapo": {"developer_prompt": BRIEF},  # DeepSeekZero is countdown's, too
    # The six tasks are those of dapo.
    "critic": {"datasets": "{gcd: {}}", "num_generations": 1, "developer_prompt": BRIEF},
    "local_kl": {"datasets": "{gcd: {}}", "developer_prompt": BRIEF},
    "gsm8k": {"data_path": "rows.json", "eval_path": "rows.json"},
    "math": {"data_path": "rows.json"},
    "math_test": {"data_path": "rows.json"},
    "rows": {"data_path": "rows.json"},
    "smollm2_cpu": {"sft_steps": 1},
}
KLONG = {"datasets.code.config.language": "klong", "rollout_engine": "native", "tp_size": 1}
SMALL = {
    "model_name_or_path": "pebble",
    "bf16": "false",
    "max_steps": 2,
    "prompts_per_step": 2,
    "num_generations": 2,
    "max_prompt_length": 2048,
    "max_completion_length": 24,
    "overlong_buffer_length": 4,
    "critic_warmup_steps": 0,
    "warmup_steps": 0,
    "fixed_eval_steps": 0,
    "eval_num_samples": 2,
    "eval_samples_per_problem": 1,
    "eval_greedy": "false",
    "reward_workers": 1,
    "save_strategy": "no",
    "preflight": "off",  # 24 tokens are too few; tests/run/test_preflight.py checks the recipes
    "output_dir": "out",
    "run_name": "run",
}


# The others run in tests/docs/test_commands.py as well, or differ from these in sizes only.
QUICK = {"countdown", "critic", "dapo", "local_kl", "q/1.5b", "q/14b"}


def cases() -> list[Any]:
    names = [str(recipe) for recipe in RECIPES if str(recipe) not in NOT_RECIPES]
    return [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("recipe", cases())
def test_two_steps_of_each_recipe(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sums = [{"question": f"What is {a} + 5?", "answer": str(a + 5)} for a in range(40)]
    (tmp_path / "rows.json").write_text(json.dumps(sums), encoding="utf-8")
    settings = {**SMALL, **(KLONG if recipe.startswith("q/") else OWN.get(recipe, {}))}
    words = [f"{key}={value}" for key, value in settings.items()]
    assert cli.run(["train", str(CONFIG / f"{recipe}.yaml"), *words]) == 0
    metrics = Path("out/run/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "eval"] == [0, 2]
    train = [row for row in rows if row["kind"] == "train"]
    assert train[-1]["step"] == 2
    # top_p raises the engine's logprobs by at most -log(top_p).
    bound = 1e-3 - math.log(load(str(CONFIG / f"{recipe}.yaml"), words).config.rollout.top_p)
    assert all(row["sampling/sampling_logp_difference/mean"] < bound for row in train)
