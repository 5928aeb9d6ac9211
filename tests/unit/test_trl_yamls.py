"""Ten public configurations for TRL's GRPOTrainer load as they are, with notes at most, and train two steps
on the embedded model.
"""

import json
import shlex
from pathlib import Path

import pytest

from whetstone.cli import run
from whetstone.config import flatten, load, make_plan

FILES = sorted((Path(__file__).parents[1] / "data" / "trl_yamls").glob("*.yaml"))
# Reward functions of those projects' own; a user names the file that has them.
OWN_REWARDS = ("open_r1_1_5b_code", "open_r1_codeforces_7b", "open_r1_zero_7b_math")
SMALL = shlex.split(
    "model_name_or_path=pebble use_vllm=false report_to=none max_steps=2 per_device_train_batch_size=2 "
    "gradient_accumulation_steps=1 num_generations=2 num_iterations=1 generation_batch_size=null "
    "max_completion_length=4 max_prompt_length=300 eval_num_samples=0 reward_workers=1 save_strategy=no"
)


def words(file: Path, folder: Path) -> list[str]:
    own = ["reward_funcs=[accuracy,format]", "reward_weights=[1,0.1]"] if file.stem in OWN_REWARDS else []
    tasks = "datasets={chain_sum: {config: {max_terms: 2, max_digits: 1}}}"  # in place of the hub's rows
    return [*SMALL, *own, tasks, f"output_dir={folder}", "run_name=run"]


def test_there_are_ten() -> None:
    assert len(FILES) == 10


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_loads_with_a_few_notes(file: Path) -> None:
    loaded = load(file)
    config, flat = loaded.config, flatten(loaded.config)
    assert len(loaded.notes) <= 5 and all("\n" not in note for note in loaded.notes)
    ((name, spec),) = config.tasks.datasets.items()
    assert name == "rows" and "/" in spec.config["dataset"]
    assert config.model.bf16 and config.rollout.rollout_engine == "vllm"
    # Values under names that are ours as well arrive unchanged.
    text = file.read_text(encoding="utf-8")
    for key in ("learning_rate", "num_generations", "max_completion_length", "beta", "seed", "warmup_ratio"):
        line = next((line for line in text.splitlines() if line.startswith(f"{key}:")), None)
        if line is not None:
            assert flat[key] == float(line.split(":")[1]), key


def test_values_that_mean_something_else() -> None:
    by_name = {file.stem: load(file).config for file in FILES}
    codeforces = by_name["open_r1_codeforces_7b"]
    assert codeforces.tasks.datasets["rows"].config["prompt_column"] == "prompt_c++17"
    assert (codeforces.loss.loss_type, codeforces.loss.scale_rewards) == ("dr_grpo", "none")
    assert codeforces.run.wandb_entity == "huggingface"
    # 8 x 16 completions a step are 8 prompts; 40 epochs of 800 problems are 4,000 steps, a checkpoint at 5 %.
    plan = make_plan(codeforces, num_problems=800)
    assert (plan.prompts_per_batch, plan.num_steps, plan.save_every) == (8, 4_000, 200)
    zero = by_name["open_r1_zero_7b_math"]
    assert make_plan(zero, num_problems=1_000, world_size=8).completions_per_batch == 512
    assert by_name["open_r1_distill_1_5b"].model.chat_template is not None
    assert "Think first" in str(by_name["open_r1_1_5b_math"].tasks.developer_prompt)
    assert by_name["doge_20m"].evaluation.fixed_eval_steps == 100
    assert by_name["mini_r1_countdown"].run.report_to == ["tensorboard"]


def trains(file: Path, folder: Path) -> None:
    assert run(["train", str(file), *words(file, folder)]) == 0
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2]
    log = (folder / "run" / "training.log").read_text()
    assert "Without effect here" in log or "has no effect" in log


@pytest.mark.parametrize("file", FILES[:1], ids=lambda file: file.stem)
def test_one_trains_two_steps(file: Path, tmp_path: Path) -> None:
    trains(file, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES[1:], ids=lambda file: file.stem)
def test_the_others_train_two_steps(file: Path, tmp_path: Path) -> None:
    trains(file, tmp_path)


def test_a_chat_template_and_its_variables_reach_the_prompt() -> None:
    from transformers import AutoTokenizer

    from whetstone.model.chat import Chat
    from whetstone.model.hub import resolve
    from whetstone.types import Problem

    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if think %}<think>{% endif %}"
    words = [f"chat_template='{template}'", "chat_template_kwargs={think: true}"]
    config = load(None, words).config.model
    assert config.chat_template == template
    chat = Chat(AutoTokenizer.from_pretrained(resolve("pebble")), config)
    problem = Problem(id="a", task="t", messages=({"role": "user", "content": "hi"},), answer={})
    assert chat.prompt(problem) == "[hi]<think>"
