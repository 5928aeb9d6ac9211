"""The plan of the recipe pages: its commands load and run, its runs are in the pages, and a page's tables are
those of the kept runs.
"""

import argparse
import importlib
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from whetstone import __main__ as cli
from whetstone.config import load, make_plan

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
recipes = importlib.import_module("recipes")
learning = importlib.import_module("learning")
PLAN = recipes.PLAN
SMALL = shlex.split(
    "bf16=false max_steps=2 prompts_per_step=2 num_generations=2 steps_per_generation=1 "
    "per_device_train_batch_size=4 gradient_accumulation_steps=1 max_completion_length=16 "
    "overlong_buffer_length=4 eval_num_samples=2 eval_samples_per_problem=2 fixed_eval_steps=0 "
    "reward_workers=1 preflight=off warmup_steps=0"
)


def settings_of(run: Any) -> list[str]:
    return shlex.split(run.command)[2:]


def test_names_are_unique_and_models_come_from_earlier_runs() -> None:
    names = [run.name for run in PLAN]
    assert len(set(names)) == len(names)
    for number, run in enumerate(PLAN):
        assert run.start is None or run.start in names[:number]
    for runs in recipes.figures().values():
        assert len({run.label for run in runs}) == len(runs)
        assert len({run.page for run in runs}) == 1


@pytest.mark.parametrize("run", PLAN, ids=lambda run: run.name)
def test_every_command_is_a_configuration_with_a_plan(run: Any) -> None:
    supervised = ["loss_type=sft"] if run.command.startswith("whet sft") else []
    loaded = load(settings_of(run)[0], [*supervised, *settings_of(run)[1:]])
    plan = make_plan(loaded.config, num_problems=1000)
    assert 4 <= plan.num_steps <= 240
    folder = Path(loaded.config.run.output_dir, loaded.config.run.run_name or "")
    for later in PLAN:  # a later command names the folder that this one writes
        if later.start == run.name:
            assert f"model_name_or_path={folder}/final_model" in later.command


def test_pages_have_commands_and_tables_of_kept_runs() -> None:
    for figure, runs in recipes.figures().items():
        page = (recipes.PAGES / f"{runs[0].page}.md").read_text(encoding="utf-8")
        place = page.split(f"<!-- {figure} -->\n", 1)[1].split("<!-- end -->")[0]
        assert place == recipes.block(figure, runs) + "\n", "python benchmarks/recipes.py --render"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Rows of GSM8K's form."""
    for split, first in (("train", 0), ("test", 100)):
        rows = [
            {
                "question": f"State the final answer to the following arithmetic problem: {a} + 5 =",
                "answer": f"{a}+5 = <<{a}+5={a + 5}>>{a + 5}\n#### {a + 5}",
            }
            for a in range(first, first + 40)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{split}.jsonl").write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("run", PLAN, ids=lambda run: run.name)
def test_every_command_runs_with_the_embedded_model(run: Any, data: Path, tmp_path: Path) -> None:
    args = argparse.Namespace(model="pebble", data=data, output=tmp_path / "out", settings=SMALL)
    words = [word for word in recipes.words_of(run, args) if not word.startswith("model_name_or_path=")]
    if "rejection_sampling=true" in words:  # needs a correct completion
        words += ["prompts_per_step=16", "max_completion_length=64", "developer_prompt=null"]
    assert cli.run([*words, "model_name_or_path=pebble"]) == 0
    reduced = learning.reduce_run(tmp_path / "out" / run.name)
    assert [entry["step"] for entry in reduced["eval"]] == [0, 2]
    assert reduced["eval"][0]["pass_at_k"].keys() == {"1", "2"}
    assert reduced["speed"]["step_time"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [1, 2])
def test_the_runner_goes_on_after_a_failure_and_hands_models_on(
    parallel: int, data: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    words = ["--model", "pebble", "--data", str(data), "--output", str(output)]
    small = [word for word in SMALL if not word.startswith("eval_samples")]
    only = ["--only", "gsm8k_sft", "gsm8k_sft_rl", "gsm8k_star_rl"]
    words += ["--parallel", str(parallel)]
    assert recipes.main([*words, *only, "--", *small]) == 1  # there is no model of gsm8k_star
    results = json.loads((output / "recipes.json").read_text(encoding="utf-8"))
    assert results.keys() == {"gsm8k_sft", "gsm8k_sft_rl"}
    assert all("error" not in result and len(result["eval"]) == 2 for result in results.values())
    assert str(tmp_path) not in json.dumps(results)
    assert {path.parent.name for path in output.glob("*/final_model")} == {"gsm8k_sft"}
    assert "==== gsm8k_sft_rl eval_step_2 " in (output / "examples.txt").read_text(encoding="utf-8")
