"""What the READMEs of five other projects show, word for word: it loads and does what it did there, or says
why not.

docs/coming_from.md is the page of it. Names one by one are in test_config.py.
"""

import json
import shlex
import sys
from pathlib import Path

import pytest
import torch

from whetstone.__main__ import run
from whetstone.commands.tasks import config_for_task
from whetstone.config import flatten, ineffective_settings, load, make_plan
from whetstone.config.sections import Config, ModelConfig
from whetstone.errors import UserError
from whetstone.model.chat import Chat
from whetstone.model.hub import base_and_adapter, load_tokenizer
from whetstone.model.policy import Policy, load_policy
from whetstone.rewards import custom
from whetstone.run.folder import run_dir
from whetstone.tasks.mixture import Mixture
from whetstone.tasks.registry import make_task

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import rl_trainer  # noqa: E402

TASKS_OF_RL_FOR_REAL = """\
datasets:
  # Simple arithmetic
  basic_arithmetic:
    weight: 1.0
    config:
      min_digits: 1
      max_digits: 2
      operators: ["+", "-"]

  # Logic puzzles
  syllogism:
    weight: 1.0
    config:
      num_premises: 2
"""
SETTINGS_OF_Q = """\
learning_rate: 2e-6
generation_temp: 0.8
eval_steps: 25
simple_eval_problems: 15
repeat_eval_problems: 4
num_processes: 7
gradient_accumulation_steps: 8
per_device_train_batch_size: 1
"""
COMMAND_OF_Q = shlex.split(
    "--model /your/best/sft/1.5b/checkpoint --use_vllm --output_dir final_outputs/1.5b/non_reasoning/ "
    "--learning_rate 2e-6 --simple_eval_problems 15 --repeat_eval_problems 4 --eval_steps 25 --use_wandb "
    "--wandb_name 1.5b_non_reason --generation_temp .8"
)
SETTINGS_OF_MATH = """\
model_path: "<your_sft_checkpoint>"  # Replace with your SFT checkpoint
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
num_return_sequences: 2  # Generate 2 responses per prompt
reward_correct: 1.0
reward_wrong: -1.0
reward_no_answer: -0.5
kl_coef: 0.05  # KL penalty coefficient
num_epochs: 3
per_device_train_batch_size: 4
gradient_accumulation_steps: 4  # Effective batch size = 16
learning_rate: 5e-6
max_new_tokens: 2048
temperature: 0.7
top_p: 0.9
"""
COMPUTE_REWARD = """\
from typing import Tuple

def compute_reward(
    generated_text: str,
    ground_truth: str,
    reward_correct: float = 1.0,
    reward_wrong: float = -1.0,
    reward_no_answer: float = -0.5
) -> Tuple[float, dict]:
    if "\\\\boxed" not in generated_text:
        return reward_no_answer, {}
    correct = f"\\\\boxed{{{ground_truth}}}" in generated_text
    return (reward_correct if correct else reward_wrong), {"correct": correct}
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "theirs.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def rows(folder: Path, entries: list[dict]) -> str:
    file = folder / "rows.json"
    file.write_text(json.dumps(entries), encoding="utf-8")
    return str(file)


def notes_of(config: Config) -> list[str]:
    return ineffective_settings(config, make_plan(config, num_problems=100))


# --- RL for Real ---


def test_tasks_of_rl_for_real(tmp_path: Path) -> None:
    config = load(written(tmp_path, TASKS_OF_RL_FOR_REAL)).config
    mixture = Mixture(config, "train")
    assert {mixture.problem(i).task for i in range(4)} == {"basic_arithmetic", "syllogism"}
    with pytest.raises(UserError, match=r"num_premises 3.* 2"):
        load_task("syllogism", {"num_premises": 3})


def load_task(name: str, settings: dict):
    config = load(None, [f"datasets={json.dumps({name: {'config': settings}})}"]).config
    return make_task(config, name, config.tasks.datasets[name], "train")


@pytest.mark.parametrize(
    "name",
    shlex.split(
        "basic_arithmetic chain_sum complex_arithmetic syllogism propositional_logic knights_knaves "
        "spell_backward word_sorting letter_counting sudoku countdown game_of_24"
    ),
)
def test_every_task_of_its_table_is_there(name: str) -> None:
    task = load_task(name, {})
    gold = task.gold(task.problem(0))
    assert gold is not None and task.score(task.problem(0), gold).parts["correct"] == 1


def test_an_attention_that_nobody_uses_is_said_to_have_no_effect() -> None:
    (note,) = notes_of(load(None, ["attn_implementation=flash_attention_2"]).config)
    assert note.startswith("No effect here: attn_implementation (rollout_engine=native")
    assert notes_of(load(None, ["attn_implementation=eager", "rollout_engine=hf"]).config) == []


# --- q ---


def test_settings_of_q(tmp_path: Path) -> None:
    loaded = load(written(tmp_path, SETTINGS_OF_Q))
    config = loaded.config
    assert (config.update.learning_rate, config.rollout.temperature) == (2e-6, 0.8)
    evaluation = config.evaluation
    assert (evaluation.fixed_eval_steps, evaluation.eval_num_samples) == (25, 15)
    assert evaluation.eval_samples_per_problem == 4
    assert any(note.startswith("num_processes (theirs.yaml) has no effect") for note in loaded.notes)


def test_the_command_of_q_as_it_is_written() -> None:
    verb, recipe, *words = rl_trainer.to_q(COMMAND_OF_Q)
    assert (verb, recipe) == ("train", "q/1.5b")
    config = load(recipe, words).config
    assert config.model.model_name_or_path == "/your/best/sft/1.5b/checkpoint"
    # The recipe samples natively; --use_vllm comes later and wins.
    assert config.rollout.rollout_engine == "vllm" and config.rollout.vllm_mode == "server"
    assert run_dir(config) == Path("final_outputs/1.5b/non_reasoning")
    assert (config.run.wandb_name, config.run.report_to) == ("1.5b_non_reason", ["wandb"])
    assert config.tasks.datasets["code"].config["language"] == "q"
    assert config.programs.max_tests_per_problem == 3
    assert not config.programs.use_reasoning_format


def test_reasoning_and_other_recipes_of_q(tmp_path: Path) -> None:
    """--use_reasoning_format changes the format, and nothing else: no engine, no GPUs, no lengths."""
    plain, reasoning = ["--model", "m"], ["--model", "m", "--use_reasoning_format"]
    first, second = (flatten(load(c[1], c[2:]).config) for c in map(rl_trainer.to_q, (plain, reasoning)))
    assert {key for key in first if first[key] != second[key]} == {"use_reasoning_format"}
    # Their common settings have no data set: they change the recipe. What comes later wins.
    file = written(tmp_path, SETTINGS_OF_Q)
    command = rl_trainer.to_q(["--config", str(file), "--model", "m", "--eval_steps", "9"])
    config = load(command[1], command[2:]).config
    assert config.tasks.datasets["code"].config["language"] == "q"
    assert (config.rollout.temperature, config.rollout.per_device_train_batch_size) == (0.8, 1)
    assert (config.evaluation.fixed_eval_steps, config.evaluation.eval_num_samples) == (9, 15)
    whole = str(written(tmp_path, "datasets: {chain_sum: {}}"))
    assert rl_trainer.to_q(["--config", whole]) == ["train", whole]
    assert rl_trainer.to_q(["--config", "q/32b", "--model", "m"]) == ["train", "q/32b", "--model", "m"]
    assert rl_trainer.to_q(["--output_dir", "a", "run_name=b"])[-1] == "run_name=b"


def test_the_outputs_of_q_have_their_names(tmp_path: Path) -> None:
    for name in ("checkpoint-1/a", "checkpoint-2/a", "eval_results/eval_step_0.json", "training.log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    rl_trainer.link_outputs(tmp_path)
    (tmp_path / "checkpoint-1" / "a").unlink()
    (tmp_path / "checkpoint-1").rmdir()
    (tmp_path / "eval_results" / "eval_step_2.json").write_text("newest")
    rl_trainer.link_outputs(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint-2"]
    assert (tmp_path / "checkpoints" / "checkpoint-2" / "a").read_text() == "checkpoint-2/a"
    assert (tmp_path / "logs" / "training_log.txt").read_text() == "training.log"
    assert (tmp_path / "logs" / "eval_results.json").read_text() == "newest"


def test_use_vllm_of_a_later_layer_wins(tmp_path: Path) -> None:
    file = str(written(tmp_path, "use_vllm: true"))
    assert load(file).config.rollout.rollout_engine == "vllm"
    assert load(file, ["use_vllm=false"]).config.rollout.rollout_engine == "native"
    assert load(file, ["rollout_engine=hf"]).config.rollout.rollout_engine == "hf"
    assert load("q/1.5b", ["use_vllm=true"]).config.rollout.rollout_engine == "vllm"


def test_who_contradicts_within_one_place_is_told_so() -> None:
    with pytest.raises(UserError, match=r"use_vllm.*rollout_engine.*native"):
        load("q/1.5b", ["use_vllm=true", "rollout_engine=native"])


# --- math ---


def test_settings_of_math(tmp_path: Path) -> None:
    loaded = load(written(tmp_path, SETTINGS_OF_MATH), ["data_path=train.json"])
    config = loaded.config
    assert config.model.model_name_or_path == "<your_sft_checkpoint>"
    assert (config.loss.beta, config.rollout.max_completion_length) == (0.05, 2048)
    assert config.tasks.datasets["math"].config == {"path": "train.json"}
    # Their guide trains an adapter and has no switch for it; here it has one, and a note says so.
    assert not config.model.use_peft and "for an adapter set use_peft=true" in notes_of(config)[0]
    adapter = load(written(tmp_path, SETTINGS_OF_MATH), ["use_peft=true"]).config.model
    assert adapter.use_peft and (adapter.lora_r, adapter.lora_alpha) == (16, 32)
    # A file of TRL's with the same settings trains all weights, as TRL does, and says so.
    trl = load(written(tmp_path, "lora_r: 64\nnum_generations: 2\nmodel_name_or_path: m")).config
    assert not trl.model.use_peft and "lora_r (all weights are trained" in notes_of(trl)[0]
    # Their guide: 18,946 samples x 2 in batches of 16, three epochs: about 7,110 steps.
    assert make_plan(config, num_problems=18_946).num_steps == 7_105


def test_a_file_in_sections(tmp_path: Path) -> None:
    nested = """\
model:
  path: checkpoints/sft
lora: {r: 8, alpha: 16, dropout: 0.05}
data: {path: train.json}
training: {num_epochs: 2, learning_rate: 5e-6}
"""
    loaded = load(written(tmp_path, nested))
    model = loaded.config.model
    assert (model.model_name_or_path, model.lora_r, model.use_peft) == ("checkpoints/sft", 8, True)
    assert loaded.config.tasks.datasets["math"].config == {"path": "train.json"}
    assert loaded.config.update.num_train_epochs == 2
    assert loaded.notes[0] == (
        "model (theirs.yaml) is a section, whose keys are read as the file's: path as model_name_or_path."
    )
    off = load(written(tmp_path, "lora: {r: 8, enabled: false}")).config.model
    assert not off.use_peft
    for text, complaint in (
        ("training: {epochz: 2}", "'epochz'"),
        ("beta: 1\ngrpo: {beta: 2}", "beta .*theirs.yaml.*grpo"),
        ("kl_coef: 0.1\nbeta: 0.3", "kl_coef.*beta.*theirs.yaml"),
    ):
        with pytest.raises(UserError, match=complaint):
            load(written(tmp_path, text))


def test_the_real_file_of_the_math_project(tmp_path: Path) -> None:
    """configs/rl_grpo_config.yaml, shortened: a name beside the path, splits, LoRA's task, devices."""
    text = """\
model: {name: Qwen2.5-Math-1.5B, path: checkpoints/sft, load_in_8bit: false}
lora: {enabled: true, r: 16, bias: none, task_type: CAUSAL_LM}
data: {train_file: x.json, max_samples: -1, train_split_ratio: 0.95, shuffle: true, seed: 42}
grpo: {num_return_sequences: 2, whiten_rewards: true, clip_range: 0.3, use_value_baseline: false}
generation: {do_sample: true, pad_token_id: null}
system: {cuda_visible_devices: "0", use_deepspeed: false, deepspeed_config: null, local_rank: -1}
debug: {enabled: false, max_debug_samples: 100}
"""
    loaded = load(written(tmp_path, text))
    config = loaded.config
    assert (config.model.model_name_or_path, config.loss.epsilon) == ("checkpoints/sft", 0.3)
    assert config.tasks.datasets["math"].config == {"path": "x.json", "eval_fraction": 0.05}
    for key in (
        "debug",
        "shuffle",
        "whiten_rewards",
        "pad_token_id",
        "cuda_visible_devices",
        "use_deepspeed",
    ):
        assert key in loaded.notes[-2], key
    for line, complaint in (
        ("data: {train_file: x.json, train_split_ratio: 95}", r"0\.95"),
        ("do_sample: false", "do_sample"),
        ("use_value_baseline: true", "advantage: gae"),
        ("lora: {bias: all}", "no biases"),
        ("system: You are a tutor.", "developer_prompt"),
    ):
        with pytest.raises(UserError, match=complaint):
            load(written(tmp_path, line))


def test_the_last_word_of_the_command_line_wins(tmp_path: Path) -> None:
    file = written(tmp_path, "kl_coef: 0.1")
    assert load(file, ["beta=0.2", "kl_coef=0.3"]).config.loss.beta == 0.3
    assert load(file, ["kl_coef=0.3", "beta=0.2"]).config.loss.beta == 0.2


def test_a_path_is_kept_whatever_the_order(tmp_path: Path) -> None:
    text = "max_samples: 10\ndata_path: a.json\ndatasets: {math: {config: {eval_fraction: 0.2}}}"
    datasets = load(written(tmp_path, text)).config.tasks.datasets
    assert datasets["math"].config == {"eval_fraction": 0.2, "path": "a.json", "max_samples": 10}
    # Generated problems have no rows: there are so many of them.
    config = load(None, ["datasets={chain_sum: {}}", "max_samples=10"]).config
    assert (config.tasks.dataset_size, config.tasks.datasets["chain_sum"].config) == (10, {})


def test_half_precision_by_either_name(tmp_path: Path) -> None:
    loaded = load(written(tmp_path, "fp16: true\nbf16: false"))
    assert loaded.config.model.bf16
    assert loaded.notes[0].startswith("fp16 (theirs.yaml) is taken for bf16")


def test_a_reward_of_one_answer(tmp_path: Path) -> None:
    file = tmp_path / "reward_utils.py"
    file.write_text(COMPUTE_REWARD, encoding="utf-8")
    texts = [r"The answer is \boxed{42}", r"\boxed{41}", "forty-two"]
    arguments = {"prompts": ["?"] * 3, "completion_ids": [[1]] * 3, "answer": ["42"] * 3}
    for completions in (texts, [custom.conversational(text) for text in texts]):
        values, _ = custom.call(
            custom.load(f"{file}:compute_reward"), {**arguments, "completions": completions}, 3
        )
        assert values == [1.0, -1.0, -0.5]


def test_the_reward_can_be_tried_on_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = rows(tmp_path, [{"question": f"{i} + 41?", "ground_truth": str(i + 41)} for i in range(40)])
    words = ["tasks", "math", f"data_path={place}", "eval_num_samples=0", "max_samples=2"]
    assert run([*words, "--answer", r"The answer is \boxed{42}"]) == 0
    text = capsys.readouterr().out
    assert text.count("taken for the answer: 42") == 2
    assert "correct 0, accuracy -1" in text and "correct 1, accuracy 1" in text
    assert run([*words, "--answer=I do not know"]) == 0
    assert capsys.readouterr().out.count("no answer found\ncorrect 0, accuracy -0.5") == 2
    assert run([*words, "--answer"]) == 2


def test_an_adapter_as_the_model_goes_on_or_is_merged(tmp_path: Path) -> None:
    """Their way to resume: --model_path results/checkpoint-1000, which here holds an adapter."""
    first = load_policy(ModelConfig(use_peft=True, lora_r=4, lora_alpha=8))
    torch.manual_seed(0)
    for parameter in first.parameters():
        parameter.data.normal_(std=0.05)
    first.model.save_pretrained(tmp_path)
    first.tokenizer.save_pretrained(tmp_path)

    def logits(policy: Policy) -> torch.Tensor:
        policy.lm.set_attn_implementation("eager")
        with torch.no_grad():
            return policy.model(input_ids=torch.arange(5, 25)[None]).logits

    expected, adapter = logits(first), str(tmp_path)
    assert (expected - logits(load_policy(ModelConfig()))).abs().max() > 0.1
    on = load_policy(ModelConfig(model_name_or_path=adapter, use_peft=True, lora_r=4, lora_alpha=8))
    assert torch.equal(logits(on), expected)
    count = sum(parameter.numel() for parameter in on.parameters())
    assert count == sum(parameter.numel() for parameter in first.parameters())
    whole = load_policy(ModelConfig(model_name_or_path=adapter))
    torch.testing.assert_close(logits(whole), expected, atol=1e-4, rtol=1e-4)
    assert not whole.is_lora and sum(parameter.numel() for parameter in whole.parameters()) == 2_677_056
    with pytest.raises(UserError, match=r"lora_r.* 16.*set lora_r=4"):
        load_policy(ModelConfig(model_name_or_path=adapter, use_peft=True))
    settings = tmp_path / "adapter_config.json"
    settings.write_text(settings.read_text().replace(base_and_adapter(adapter)[0], "/gone/away"))
    with pytest.raises(UserError, match="/gone/away"):
        load_policy(ModelConfig(model_name_or_path=adapter))


# --- one file, FSDP and tensor parallel: countdown ---


def test_a_rollout_is_cut_into_updates() -> None:
    """8 prompts x 8, 4 updates: the recipe that ships says the same in our words."""
    for words in (
        ["per_rollout_size=8", "updates_per_rollout=4"],
        ["updates_per_rollout=4", "per_rollout_size=8"],
    ):
        theirs = load(None, [*words, "responses_per_prompt=8", "max_steps=8"]).config
        plan = make_plan(theirs, num_problems=100)
        same = ["max_steps=8", "fixed_eval_steps=0", "save_steps=500"]
        ours = make_plan(load("countdown", same).config, num_problems=100)
        assert (plan.prompts_per_batch, plan.completions_per_batch, plan.updates_per_batch) == (8, 64, 4)
        assert plan == ours


def test_a_rollout_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UserError, match=r"per_rollout_size.* 9.* 4 .*updates_per_rollout.* 8"):
        load(None, ["per_rollout_size=9", "updates_per_rollout=4"])


def test_a_rollout_in_the_file_is_cut_by_the_command_line(tmp_path: Path) -> None:
    file = written(tmp_path, "per_rollout_size: 8\nupdates_per_rollout: 4\nmax_steps: 8")
    plan = make_plan(load(file, ["updates_per_rollout=2"]).config, num_problems=100)
    assert (plan.prompts_per_batch, plan.updates_per_batch) == (8, 2)


SYSTEM = {"role": "system", "content": "You think first."}
ASKED = {"role": "user", "content": "Make 10 of 4, 2, 8."}


def test_messages_of_a_row_are_its_prompt(tmp_path: Path) -> None:
    row = {"messages": [SYSTEM, ASKED], "target": 10, "nums": [4, 2, 8]}
    place = rows(tmp_path, [row])
    config = config_for_task("countdown", {"path": place, "eval_num_samples": 0})
    task = make_task(config, "countdown", config.tasks.datasets["countdown"], "train")
    problem = task.problem(0)
    assert problem.messages == (SYSTEM, ASKED)
    assert task.score(problem, "<answer> 8 + 4 - 2 = 10 </answer>").parts["correct"] == 1
    assert task.columns(problem)["nums"] == [4, 2, 8]


@pytest.mark.parametrize("column", ["messages", "prompt"])
def test_math_keeps_system_message_of_a_row(tmp_path: Path, column: str) -> None:
    solved = {"role": "assistant", "content": r"\boxed{10}"}  # as in supervised data: not part of the prompt
    place = rows(tmp_path, [{column: [SYSTEM, ASKED, solved], "answer": "10"}])

    def messages(**keys: str) -> tuple:
        config = config_for_task("math", {"path": place, "eval_num_samples": 0, **keys})
        return make_task(config, "math", config.tasks.datasets["math"], "train").problem(0).messages

    assert messages() == (SYSTEM, ASKED)
    assert messages(developer_prompt="Be brief, please.") == (
        {"role": "system", "content": "Be brief, please."},
        ASKED,
    )
    assert messages(developer_prompt="Be brief, please.", developer_role="user") == (
        {"role": "user", "content": "Be brief, please.\n\nMake 10 of 4, 2, 8."},
    )


def test_its_prompt_without_a_chat_template() -> None:
    words = [
        "datasets={countdown: {}}",
        "apply_chat_template=false",
        r'prompt_template="<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n {question}<|im_end|>\n'
        r'<|im_start|>assistant\n"',
        r'assistant_prefix="Let me solve this step by step.\n<think>"',
        "developer_prompt=You are a helpful assistant.",
    ]
    config = load(None, words).config
    problem = make_task(config, "countdown", config.tasks.datasets["countdown"], "train").problem(0)
    given = problem.answer
    assert Chat(load_tokenizer("pebble"), config.model).prompt(problem) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n "
        f"Using the numbers {list(given['numbers'])}, create an equation that equals {given['target']}. "
        "You can use basic arithmetic operations (+, -, *, /) and each number can only be used once. Show "
        "your work in <think> </think> tags. And return the final answer in <answer> </answer> tags, for "
        "example <answer> (1 + 2) / 3 </answer>.<|im_end|>\n"
        "<|im_start|>assistant\nLet me solve this step by step.\n<think>"
    )


def test_lora_settings_without_use_peft_are_named(tmp_path: Path) -> None:
    """The math project's README: `lora_r: 16` in its flat file; 16 is our default, too."""
    loaded = load(written(tmp_path, "model_path: pebble\nlora_r: 16\n"))
    assert not loaded.config.model.use_peft
    assert "lora_r (theirs.yaml) adds no adapter" in " ".join(loaded.notes)
    for text in ("lora_r: 16\nuse_peft: false\n", "lora: {r: 16}\n", "model_path: pebble\n"):
        assert "no adapter" not in " ".join(load(written(tmp_path, text)).notes)
