"""Ten public configurations for TRL's GRPOTrainer load as they are, with notes at most, and train two steps
on the embedded model, on rows with the columns of their own data sets.
"""

import json
import shlex
from pathlib import Path

import pytest

from tests.corpora.trl_rows import REWARDS, write_rows
from whetstone.__main__ import run
from whetstone.config import flatten, load, make_plan
from whetstone.errors import UserError
from whetstone.tasks.mixture import build_tasks

FILES = sorted((Path(__file__).parents[1] / "data" / "trl_yamls").glob("*.yaml"))
# What a user gives besides: the file with a project's own reward functions, the task that makes a prompt of
# numbers. Everything else, weights included, is the file's.
BESIDES = {
    "open_r1_1_5b_code": ["reward_funcs=[rewards.py:code,format]"],
    "open_r1_codeforces_7b": ["reward_funcs=[rewards.py:cf_code,rewards.py:code_format]"],
    "open_r1_zero_7b_math": ["reward_funcs=[accuracy,format,rewards.py:soft_format]"],
    "spec_gaming_1_5b": ["reward_funcs=[format,rewards.py:cosine]"],
    "mini_r1_countdown": ["datasets={countdown: {}}"],
}
SMALL = shlex.split(
    "model_name_or_path=pebble use_vllm=false report_to=none max_steps=2 per_device_train_batch_size=2 "
    "gradient_accumulation_steps=1 num_generations=2 num_iterations=1 generation_batch_size=null "
    "max_completion_length=4 max_prompt_length=300 eval_num_samples=0 reward_workers=1 save_strategy=no "
    "preflight=off push_to_hub=false"
)


def words(file: Path, folder: Path) -> list[str]:
    """The command line: few steps, a small model, and the file's data set from a local file."""
    rows = write_rows(dataset_of(file), folder)
    return [
        *SMALL,
        *BESIDES.get(file.stem, []),
        f"dataset_name={rows}",
        f"output_dir={folder}",
        "run_name=run",
    ]


def dataset_of(file: Path) -> str:
    return load(file).config.tasks.datasets["rows"].config["dataset"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_loads_with_a_few_notes(file: Path) -> None:
    loaded = load(file)
    config, flat = loaded.config, flatten(loaded.config)
    assert len(loaded.notes) <= 6 and all("\n" not in note for note in loaded.notes)
    ((name, spec),) = config.tasks.datasets.items()
    assert name == "rows" and "/" in spec.config["dataset"]
    assert config.model.bf16 and (config.rollout.rollout_engine == "vllm") == (file.stem != "slm_policy_1_5b")
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
    assert by_name["open_r1_zero_7b_math"].model.chat_template is not None
    assert "Think first" in str(by_name["open_r1_1_5b_math"].tasks.developer_prompt)
    assert by_name["doge_20m"].evaluation.fixed_eval_steps == 100
    assert by_name["mini_r1_countdown"].run.report_to == ["tensorboard"]


# file -> (columns of prompt and answer, match where accuracy is paid)
COMPARED: dict[str, tuple[str, str, str | None]] = {
    "doge_20m": ("problem", "solution", "numeric"),
    "open_r1_1_5b_math": ("problem", "answer", "math"),
    "slm_policy_1_5b": ("problem", "answer", "math"),
    "spec_gaming_1_5b": ("problem", "answer", None),
    "open_r1_math_7b_simple_rl": ("problem", "solution", "numeric"),
    "open_r1_smollm2_1_7b": ("problem", "answer", "math"),
    "open_r1_zero_7b_math": ("prompt", "solution", "numeric"),
}


def trains(file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
    monkeypatch.chdir(folder)
    assert run(["train", str(file), *words(file, folder)]) == 0
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2]
    log = (folder / "run" / "training.log").read_text()
    assert "Without effect here" in log or "has no effect" in log
    if file.stem in COMPARED:
        prompt, answer, match = COMPARED[file.stem]
        columns = f"prompt from {prompt}, answer from {answer}"
        assert f"8 rows of {folder / 'rows.jsonl'}: 8 to train on; {columns}" in log
        assert match is None or f"(match: {match})" in log


@pytest.mark.parametrize("file", FILES[:1], ids=lambda file: file.stem)
def test_one_trains_two_steps(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trains(file, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES[1:], ids=lambda file: file.stem)
def test_the_others_train_two_steps(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trains(file, tmp_path, monkeypatch)


def test_rows_of_countdown_are_sent_to_its_task(tmp_path: Path) -> None:
    """Rows of numbers and a target have no prompt; the sentence names the task that writes one."""
    file = next(file for file in FILES if file.stem == "mini_r1_countdown")
    few = ["eval_num_samples=0"]
    rows = write_rows(dataset_of(file), tmp_path)
    with pytest.raises(UserError, match=r"datasets=\{countdown: \{\}\}"):
        build_tasks(load(file, [*few, f"dataset_name={rows}"]).config, "train")
    words = [*few, f"dataset_name={rows}", "datasets={countdown: {}}"]
    mixture = build_tasks(load(file, words).config, "train")
    questions = [mixture.problem(i).messages[-1]["content"] for i in range(8)]
    assert (
        len(mixture) == 8 and sum("[2, 3, 1], create an equation that equals 4" in q for q in questions) == 1
    )


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
