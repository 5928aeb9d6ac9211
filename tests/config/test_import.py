"""`whet import`: public configurations of six projects. Converted numbers are worked out by hand."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.corpora.trl_rows import write_rows
from whetstone.__main__ import run
from whetstone.config import flatten, load, make_plan
from whetstone.config.foreign import Imported, import_file
from whetstone.config.load import SECTION_OF
from whetstone.config.tables import PROJECTS, table
from whetstone.config.translate import OTHER_NAMES
from whetstone.errors import UserError
from whetstone.rewards import custom

FOLDER = Path(__file__).parents[1] / "data" / "foreign"
FILES = sorted(FOLDER.iterdir())
OF_TRL = sorted((FOLDER.parent / "trl_yamls").glob("*.yaml"))
# Worked out by hand from the files.
EXPECTED: dict[str, dict[str, Any]] = {
    # 1024 prompts are 4 updates of 256; 20 and 5 of their steps are 80 and 20 updates.
    "verl_grpo_math.sh": {
        "num_generations": 5, "prompts_per_step": 256, "steps_per_generation": 4, "save_steps": 80,
        "fixed_eval_steps": 20, "num_train_epochs": 15, "beta": 0.001, "kl_estimator": "k3", "delta": 3.0,
        "use_bias_correction_kl": False, "weight_decay": 0.01, "eval_temperature": 0.0, "advantage": "group",
        "rollout_engine": "vllm", "vllm_mode": "colocate", "wandb_project": "verl_grpo_example_gsm8k_math",
        "lr_scheduler_type": "constant_with_warmup",
    },
    # 512 prompts are 16 updates of 32: 200 steps are 3,200, 10 of warm-up 160. 2 x 1024, 8 x 1024, 4 x 1024.
    "verl_dapo_math.sh": {
        "num_generations": 16, "prompts_per_step": 32, "steps_per_generation": 16, "max_steps": 3200,
        "warmup_steps": 160, "save_steps": 160, "max_prompt_length": 2048, "max_completion_length": 8192,
        "overlong_buffer_length": 4096, "reward_funcs": ["accuracy", "length"], "epsilon": 0.2,
        "epsilon_high": 0.28, "delta": 10.0, "weight_decay": 0.1, "cpu_offload": "all", "loss_type": "dapo",
        "output_dir": f"{Path.home()}/verl/ckpts/DAPO/DAPO-Qwen2.5-7b-MATH-0527a1", "auto_resume": True,
    },
    # One completion a prompt, as verl's default is; its lambda is 1, ours 0.95.
    "verl_ppo_0_5b.sh": {
        "num_generations": 1, "advantage": "gae", "gae_lambda": 1.0, "value_clip": 0.5, "prompts_per_step": 8,
        "steps_per_generation": 1, "fixed_eval_steps": 10, "save_strategy": "no", "num_train_epochs": 1,
    },
    # Unsloth raises a batch of 1 to the 6 completions of a group; 1024 - 256 = 768.
    "unsloth_llama_8b.ipynb": {
        "num_generations": 6, "per_device_train_batch_size": 6, "max_completion_length": 768, "lora_r": 32,
        "max_prompt_length": 256, "use_peft": True, "load_in_4bit": True, "lora_alpha": 32, "seed": 3407,
        "optim": "adamw_8bit", "beta": 0.001, "loss_type": "bnpo", "bf16": True, "max_grad_norm": 0.1,
    },
    "unsloth_deepseek_8b.ipynb": {
        "num_generations": 4, "per_device_train_batch_size": 4, "lora_alpha": 64, "min_p": 0.1, "top_p": 1.0,
        "datasets": {"rows": {"config": {
            "dataset": "open-r1/DAPO-Math-17k-Processed", "name": "en", "split": "train"}}},
    },
    # Four checkpoints in one epoch: every quarter of the steps.
    "axolotl_gsm8k.yaml": {
        "num_generations": 16, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 8,
        "save_steps": 0.25, "warmup_steps": 100, "weight_decay": 0.1, "eval_num_samples": 0,
        "reward_funcs": ["gsm8k_grpo.py:correctness_reward_func", "gsm8k_grpo.py:int_reward_func"],
        "importance_correction": "sequence_mask", "server_max_model_length": 800, "num_train_epochs": 1,
    },
    "axolotl_acecode.yaml": {
        "save_steps": 0.5, "max_steps": 10_000, "warmup_steps": 1500, "beta": 0.001, "push_to_hub": True,
        "lr_scheduler_kwargs": {
            "num_stable_steps": 6000, "num_decay_steps": 2500, "min_lr_ratio": 0.1, "num_cycles": 0.5},
    },
    # 128 rollouts in groups of 8 are 16 prompts.
    "prime_rl_hendrycks.toml": {
        "num_generations": 8, "prompts_per_step": 16, "max_completion_length": 8192, "max_steps": 5000,
        "scale_rewards": "none", "weight_decay": 0.01, "lr_scheduler_type": "constant", "async_rollouts": 1,
        "datasets": {"rows": {"config": {"dataset": "mikasenghaas/Sanity-Test-R1D-1.5B", "name": "default"}}},
    },
    # 512 prompts x 16 = 8192 completions, 8 updates of 1024: 64 prompts each; 5 steps are 40 updates.
    "openrlhf_prorlv2.sh": {
        "num_generations": 16, "prompts_per_step": 64, "steps_per_generation": 8, "save_steps": 40,
        "fixed_eval_steps": 40, "epsilon": 0.2, "epsilon_high": 0.27, "adam_beta2": 0.95, "beta": 0.0001,
        "kl_in": "loss", "kl_estimator": "k2", "importance_correction": "token_mask",
        "importance_correction_min": 0.5, "importance_correction_max": 5.0, "scale_rewards": "batch",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "warmup_ratio": 0.03, "eval_samples_per_problem": 4,
    },
}  # fmt: skip
SMALL = shlex.split(
    "model_name_or_path=pebble rollout_engine=native use_vllm=false report_to=none max_steps=1 "
    "num_iterations=1 "
    "prompts_per_step=2 num_generations=2 steps_per_generation=1 gradient_accumulation_steps=1 bf16=false "
    "max_completion_length=4 max_prompt_length=300 eval_num_samples=0 reward_workers=1 save_strategy=no "
    "preflight=off push_to_hub=false load_in_4bit=false warmup_steps=0 reward_funcs=[accuracy] "
    "reward_weights=null eval_datasets={} lora_target_modules=all-linear torch_compile=false "
    "generation_batch_size=null async_rollouts=0"
)


def written(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def imported(folder: Path, name: str, text: str, project: str | None = None) -> Imported:
    return import_file(written(folder, name, text), project)


def output_of(file: Path, folder: Path, *words: str) -> Path:
    output = folder / "ours.yaml"
    assert run(["import", str(file), "-o", str(output), *words]) == 0
    return output


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_public_file_gives_the_numbers_of_its_project(file: Path, tmp_path: Path) -> None:
    output = output_of(file, tmp_path)
    text = output.read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    assert {key: values.get(key) for key in EXPECTED[file.name]} == EXPECTED[file.name]
    assert "Not valid" not in text
    flat = flatten(load(output).config)  # our names alone: no note is left to say
    assert load(output).notes == () and flat["model_name_or_path"] == values["model_name_or_path"]
    make_plan(load(output).config, num_problems=10_000) if flat["advantage"] != "group" else None
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(lines) == len(values) and all("  # " in line for line in lines)


@pytest.mark.parametrize("file", OF_TRL, ids=lambda file: file.stem)
def test_a_public_file_of_trl_means_what_trl_would_do(file: Path, tmp_path: Path) -> None:
    ours, theirs = load(output_of(file, tmp_path)).config, load(file).config
    flat, direct = flatten(ours), flatten(theirs)
    differs = {key for key in flat if flat[key] != direct[key]} - {"run_name", "rollout_engine"}
    assert differs <= {"bf16", "importance_correction", "vllm_mode", "num_train_epochs", "lora_dropout"}
    assert flat["lora_dropout"] == (0.05 if flat["use_peft"] else 0.0)
    assert (flat["importance_correction"] == "sequence_mask") == (direct["rollout_engine"] == "vllm")
    assert flat["bf16"]


def keys_of(file: Path) -> set[str]:
    """The last parts of what a file sets, found by other means than the importer's."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".sh":
        words = shlex.split(text.split("python3")[1].replace("\\\n", " "))
        names = [
            w.lstrip("+-").partition("=")[0] for w in words if w.startswith("--") or ("." in w and "=" in w)
        ]
        return {name.split(".")[-1] for name in names}
    if file.suffix == ".yaml":
        data = yaml.safe_load(text)
        nested = [inner for key in ("trl", "vllm") for inner in data.get(key, {})]
        return {
            *nested,
            *(key for key, value in data.items() if value is not None and key not in ("trl", "vllm")),
        }
    return set()


@pytest.mark.parametrize(
    "file", [f for f in (*FILES, *OF_TRL) if f.suffix in (".sh", ".yaml")], ids=lambda file: file.name
)
def test_no_key_of_a_file_is_dropped(file: Path, tmp_path: Path) -> None:
    text = output_of(file, tmp_path).read_text(encoding="utf-8")
    assert {key for key in keys_of(file) if key not in text} == set()


@pytest.mark.parametrize("project", PROJECTS)
def test_every_target_of_a_table_is_known(project: str) -> None:
    known, parts = {*SECTION_OF, *OTHER_NAMES, "eval_path", "eval_split", "eval_fraction"}, table(project)
    named = {*parts["names"].values(), *parts["arithmetic"], *parts["fixed"]}
    chosen = {
        key for choices in parts["values"].values() for settings in choices.values() for key in settings
    }
    assert (named | chosen) - known == set()


def test_the_two_forms_of_the_flags_of_openrlhf_agree(tmp_path: Path) -> None:
    """Flags since 0.10.2 have sections; openrlhf's own migration guide has the pairs."""
    old = """python -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data d --train_batch_size 128
        --rollout_batch_size 64 --n_samples_per_prompt 8 --advantage_estimator group_norm --init_kl_coef 0.01
        --use_kl_loss --kl_estimator k3 --actor_learning_rate 5e-7 --eps_clip_low_high 0.2 0.3 --lambd 1
        --lora_rank 8 --generate_max_len 100 --apply_chat_template --save_steps 2 --dynamic_filtering"""
    new = """python -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m --data.prompt_dataset d
        --train.batch_size 128 --rollout.batch_size 64 --rollout.n_samples_per_prompt 8
        --algo.advantage.estimator group_norm --algo.kl.init_coef 0.01 --algo.kl.use_loss
        --algo.kl.estimator k3 --actor.adam.lr 5e-7 --actor.eps_clip_low_high 0.2 0.3
        --algo.advantage.lambd 1 --ds.lora.rank 8 --rollout.max_new_tokens 100 --data.apply_chat_template
        --ckpt.save_steps 2 --algo.dynamic_filtering_enable"""
    a, b = (
        imported(tmp_path, f"{name}.sh", text.replace("\n", " \\\n"))
        for name, text in (("old", old), ("new", new))
    )
    assert a.settings() == b.settings()
    assert a.left == {"it changes nothing here": ["apply_chat_template: True"]}
    assert b.left == {"it changes nothing here": ["data.apply_chat_template: True"]}
    # 64 x 8 completions in updates of 128: 4 of 16 prompts; 2 steps are 8 updates.
    expected = {
        "prompts_per_step": 16,
        "steps_per_generation": 4,
        "save_steps": 8,
        "lora_r": 8,
        "use_peft": True,
    }
    assert {key: a.settings()[key] for key in expected} == expected


def test_verl_as_yaml_and_as_overrides_is_the_same(tmp_path: Path) -> None:
    nested = {
        "data": {"train_files": "a.parquet", "val_files": "b.parquet", "train_batch_size": 64,
                 "apply_chat_template_kwargs": {"enable_thinking": False}},
        "actor_rollout_ref": {
            "model": {"path": "m", "lora_rank": 16},
            "actor": {"ppo_mini_batch_size": 16, "ppo_epochs": 2, "loss_agg_mode": "seq-mean-token-sum-norm"},
            "rollout": {"n": 4, "name": "sglang", "top_k": -1},
        },
        "algorithm": {"adv_estimator": "rloo", "use_kl_in_reward": True, "kl_ctrl": {"kl_coef": 0.05}},
        "trainer": {"total_training_steps": 10, "val_files": "x"},
    }  # fmt: skip

    def overrides(values: dict, head: str = "") -> list[str]:
        return [
            word
            for key, value in values.items()
            for word in (
                overrides(value, f"{head}{key}.") if isinstance(value, dict) else [f"{head}{key}={value}"]
            )
        ]

    first = imported(tmp_path, "verl.yaml", yaml.safe_dump(nested))
    second = imported(tmp_path, "verl.sh", f"python -m verl.trainer.main_ppo {shlex.join(overrides(nested))}")
    assert first.settings() == second.settings()
    assert {k: sorted(v) for k, v in first.left.items()} == {k: sorted(v) for k, v in second.left.items()}
    # 64 / 16 = 4 updates, twice: 10 steps are 80 optimizer steps.
    assert first.settings()["max_steps"] == 80 and first.settings()["steps_per_generation"] == 4
    ours = {"beta": 0.05, "kl_in": "reward", "kl_estimator": "k1", "advantage": "rloo",
            "loss_type": "dr_grpo",
            "use_peft": True, "lora_r": 16, "rollout_engine": "sglang", "num_iterations": 2,
            "chat_template_kwargs": {"enable_thinking": False}}  # fmt: skip
    assert {key: first.settings().get(key) for key in ours} == ours
    assert any("trainer.val_files" in key for keys in first.left.values() for key in keys)


def test_a_reward_function_of_verl_is_taken_as_it_is(tmp_path: Path) -> None:
    text = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    file = written(
        tmp_path, "score.py", f"{text}    return float(ground_truth in solution_str) + extra_info['more']\n"
    )
    columns = {"answer": ["42", "42"], "data_source": ["a", "a"], "extra_info": [{"more": 1}, {"more": 2}]}
    arguments = {
        "prompts": ["?"] * 2,
        "completions": ["It is 42.", "41"],
        "completion_ids": [[1], [2]],
        **columns,
    }
    assert custom.call(custom.load(f"{file}:compute_score"), arguments, 2)[0] == [2.0, 2.0]


def test_an_unknown_key_and_an_inexact_batch_are_said(tmp_path: Path) -> None:
    text = "actor_rollout_ref: {model: {path: m, novelty: 3}, actor: {ppo_mini_batch_size: 100}}"
    result = imported(tmp_path, "verl.yaml", text)
    assert result.left["no counterpart is known"] == ["actor_rollout_ref.model.novelty: 3"]
    assert "steps_per_generation" in result.differs[-1]  # 1024 / 100 is no whole number


def test_values_without_a_counterpart_are_said(tmp_path: Path) -> None:
    text = "actor_rollout_ref: {model: {path: m}}\nalgorithm: {adv_estimator: remax}"
    result = imported(tmp_path, "verl.yaml", text)
    assert any("remax" in reason and "rloo" in reason for reason in result.left)


def test_settings_of_verl_that_have_our_names_are_taken(tmp_path: Path) -> None:
    text = (
        "actor_rollout_ref: {model: {path: m}, actor: {optim: {betas: [0.8, 0.95]}}}\n"
        "data: {filter_overlong_prompts: true}\nalgorithm: {kl_ctrl: {type: adaptive}}"
    )
    result = imported(tmp_path, "verl.yaml", text)
    ours = {"filter_overlong_prompts": True, "adam_beta1": 0.8, "adam_beta2": 0.95}
    assert {key: result.settings().get(key) for key in ours} == ours
    assert any("adaptive" in reason for reason in result.left)


def test_the_kl_coefficient_of_verl_is_taken(tmp_path: Path) -> None:
    text = (
        "B=15\npython -m verl.main data.train_files=a data.val_files='[b,c]' actor_rollout_ref.model.path=m "
        "actor_rollout_ref.actor.ppo_mini_batch_size=$((B/2)) data.train_batch_size=$((B/2*4)) "
        "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01 "
        "actor_rollout_ref.actor.kl_loss_coef=0.02 ++actor_rollout_ref.rollout.n=5 word"
    )
    result = imported(tmp_path, "verl.sh", text)
    # The last override wins; a shell divides without a rest: 15 / 2 is 7, times 4 is 28.
    ours = {"beta": 0.02, "prompts_per_step": 7, "steps_per_generation": 4, "num_generations": 5}
    assert {key: result.settings()[key] for key in ours} == ours
    assert any("data.val_files: c" in keys for keys in result.left.values())  # b is evaluated


def test_rollouts_per_example_of_prime_rl_is_the_group(tmp_path: Path) -> None:
    text = "[orchestrator]\nbatch_size = 128\nrollouts_per_example = 16"
    settings = imported(tmp_path, "rl.toml", text).settings()
    assert (settings["num_generations"], settings["prompts_per_step"]) == (16, 8)


def test_interpolations_are_filled_in_or_said(tmp_path: Path) -> None:
    nested = {
        "data": {"train_files": "${oc.env:HOME}/x.parquet", "train_batch_size": 64},
        "actor_rollout_ref": {
            "model": {"path": "m"}, "actor": {"ppo_mini_batch_size": "${data.train_batch_size}"},
        },
        "trainer": {"total_training_steps": "10"},
    }  # fmt: skip
    result = imported(tmp_path, "verl.yaml", yaml.safe_dump(nested))
    assert (result.settings()["prompts_per_step"], result.settings()["steps_per_generation"]) == (64, 1)
    left = json.dumps(result.left)
    assert "data.train_files: ${oc.env:HOME}" in left and "total_training_steps: 10" in left
    assert "datasets" not in result.settings() and "max_steps" not in result.settings()


def test_what_a_script_says_beside_keywords(tmp_path: Path) -> None:
    text = """
size = 8
size *= 2
more = {"beta": 0.1}
args = GRPOConfig("there", per_device_train_batch_size=size, max_steps=1000 // 3, **more)
args.num_train_epochs = 5
trainer = GRPOTrainer("m", [f], args)
"""
    result = imported(tmp_path, "train.py", text)
    left = json.dumps(result.left)
    for key in (
        "there",
        "per_device_train_batch_size: size",
        "**more",
        "num_train_epochs (line 6): 5",
        "[f]",
    ):
        assert key in left, key
    assert result.settings()["max_steps"] == 333 and "beta" not in result.settings()
    assert "per_device_train_batch_size" not in result.settings()


def test_nothing_of_a_script_is_executed(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    for name, text in (
        (
            "a.py",
            f"open({str(mark)!r}, 'w')\nfrom trl import GRPOConfig\nGRPOConfig(beta=print(1), epsilon=0.3)",
        ),
        (
            "a.sh",
            f"touch {mark}\nX=$(touch {mark})\npython -m openrlhf.x --prompt_data a --pretrain $(id)",
        ),
    ):
        result = imported(tmp_path, name, text)
        assert any("only running" in reason for reason in result.left)
    assert not mark.exists()


def test_a_script_of_trl(tmp_path: Path) -> None:
    text = """
group = 4
dataset = load_dataset("trl-lib/DeepMath-103K", split="train")
args = GRPOConfig(output_dir="o", num_generations=group, per_device_train_batch_size=group * 2, beta=0.04,
    use_vllm=True, ddp_timeout=180000000, hub_strategy="end", repetition_penalty=1.1,
    chat_template_kwargs={"enable_thinking": False}, lr_scheduler_kwargs=dict(min_lr_rate=0.1))
trainer = GRPOTrainer("Qwen/Qwen3-0.6B", reward_funcs=accuracy_reward, args=args, train_dataset=dataset,
    peft_config=LoraConfig(r=8, lora_alpha=16, task_type="CAUSAL_LM"))
GRPOConfig(beta=0.5)
"""
    result = imported(tmp_path, "train.py", text)
    settings = result.settings()
    assert (result.project, settings["model_name_or_path"]) == ("trl", "Qwen/Qwen3-0.6B")
    assert (settings["num_generations"], settings["per_device_train_batch_size"]) == (4, 8)
    assert settings["chat_template_kwargs"] == {"enable_thinking": False}
    assert settings["lr_scheduler_kwargs"] == {"min_lr_rate": 0.1}
    assert settings["collective_timeout_s"] == 7 * 86_400 and settings["use_peft"] and settings["lora_r"] == 8
    # What TRL takes where a script says nothing.
    theirs = {"num_train_epochs": 3.0, "bf16": True, "importance_correction": "sequence_mask"}
    assert {key: settings[key] for key in theirs} == theirs and settings["vllm_mode"] == "colocate"
    left = json.dumps(result.left)
    for key in ("hub_strategy", "repetition_penalty", "reward_funcs", "beta (line 9): 0.5"):
        assert key in left, key


def test_a_file_of_trl_says_what_trl_would_take(tmp_path: Path) -> None:
    file = written(tmp_path, "trl.yaml", "dataset_name: a/b\nuse_vllm: true\nlog_level: info")
    note = load(file).notes[-1]
    for part in (
        "num_train_epochs 3.0 (here 1.0)",
        "bf16 True",
        "importance_correction sequence_mask",
        "vllm_mode",
    ):
        assert part in note, part
    more = "\nmax_steps: 5\nbf16: true\nvllm_importance_sampling_mode: token_mask\nvllm_mode: server"
    whole = written(tmp_path, "whole.yaml", file.read_text() + more)
    assert not any("TRL sets" in note for note in load(whole).notes)
    ours = written(tmp_path, "ours.yaml", "datasets: {chain_sum: {}}\nlearning_rate: 1.0e-05")
    assert load(ours).notes == ()


def test_a_file_of_another_project_is_sent_to_import() -> None:
    with pytest.raises(UserError, match=r"axolotl.*whet import"):
        load(FOLDER / "axolotl_gsm8k.yaml")


def test_it_writes_over_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = written(tmp_path, "ours.yaml", "beta: 1")
    file = str(FOLDER / "axolotl_gsm8k.yaml")
    assert run(["import", file, "-o", str(there)]) == 2 and there.read_text() == "beta: 1"
    assert "--force" in capsys.readouterr().err
    assert run(["import", file, "-o", str(there), "--force"]) == 0 and "base_model" in there.read_text()
    capsys.readouterr()
    assert run(["import", file]) == 0
    assert capsys.readouterr().out == there.read_text()


def test_texts_of_a_file_stay_in_their_comments(tmp_path: Path) -> None:
    evil = "x\nbeta: 99\x85epsilon: 9\u2028seed: 7 \x1b[31m"
    theirs = {"base_model": "m", "wandb_project": evil, "chat_template": evil, f"k{evil}": evil, "lr": 1e-5}
    text = output_of(written(tmp_path, "a.yaml", yaml.safe_dump(theirs)), tmp_path).read_text(
        encoding="utf-8"
    )
    assert not {"beta", "epsilon", "seed"} & set(yaml.safe_load(text))
    assert yaml.safe_load(text)["wandb_project"] == evil and "\x1b" not in text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", "max_steps = "),
        ("a.py", "GRPOConfig("),
        ("a.ipynb", "[]"),
        ("a.ipynb", '{"cells": [1]}'),
        ("a.sh", "python -m verl.x data.a='b"),
        ("a.sh", "A=xx\n" + "A=$A$A$A$A\n" * 40),
        ("a.sh", "echo hello"),
        ("a.yaml", "- 1"),
        ("a.py", "x = " + "(" * 5000),
        ("missing.yaml", None),
        ("missing.sh", None),
    ],
)
def test_a_broken_file_is_one_sentence(
    name: str, text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / name if text is None else written(tmp_path, name, text)
    assert run(["import", str(file)]) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith("whet: ") and name in error and error.count("\n") == 1 and "Traceback" not in error
    )


def trains(file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    output = output_of(file, folder)
    rows = write_rows("open-r1/DAPO-Math-17k-Processed", folder)
    tasks = f"datasets={{rows: {{config: {{path: {rows}, prompt_column: prompt, answer_column: solution}}}}}}"
    words = [*SMALL, tasks, f"output_dir={folder}", "run_name=run"]
    assert run(["config", str(output), "--changed", *words]) == run(["train", str(output), *words]) == 0
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1]


QUICK = ("verl_ppo_0_5b.sh", "openrlhf_prorlv2.sh")


@pytest.mark.parametrize("name", QUICK)
def test_two_train_a_step(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trains(FOLDER / name, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("file", [f for f in (*FILES, *OF_TRL) if f.name not in QUICK], ids=lambda f: f.name)
def test_the_others_train_a_step(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trains(file, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [  # as verl's core_algos.py and OpenRLHF's loss.py and experience_maker.py compute
        (
            {"actor.loss_agg_mode": "token-mean", "actor.policy_loss.loss_mode": "cispo"},
            {"loss_type": "cispo"},
        ),
        ({"actor.clip_ratio_low": 0.1, "actor.clip_ratio": 0.2}, {"epsilon": 0.1}),
        ({"actor.clip_ratio": 0.1}, {"epsilon": 0.1}),
        (
            {"actor.use_kl_loss": True, "actor.kl_loss_type": "low_var_kl", "algorithm.kl_penalty": "kl"},
            {"kl_estimator": "k3"},
        ),
        (
            {"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "kl", "actor.kl_loss_type": "mse"},
            {"kl_estimator": "k1"},
        ),
        ({"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "low_var_kl"}, {"kl_estimator": "k3"}),
        ({"actor.kl_loss_type": "mse"}, {"kl_estimator": None}),
        ({"algorithm.rollout_correction.rollout_is": "token"}, {"importance_correction_max": 2.0}),
        (
            {
                "algorithm.rollout_correction.rollout_is": "token",
                "algorithm.rollout_correction.rollout_is_threshold": 4.0,
            },
            {"importance_correction_max": 4.0},
        ),
        ({"model.lora_rank": 8}, {"lora_alpha": 16}),
        ({"data.filter_overlong_prompts": True}, {"filter_overlong_prompts": True}),
        ({"algorithm.filter_groups.max_num_gen_batches": 0}, {"dynamic_sampling_max_rounds": None}),
        (
            {"--actor.policy_loss_type": "gspo"},
            {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        ),
        ({"--actor.loss_agg_mode": "seq-mean-token-mean"}, {"loss_type": "grpo"}),
        (
            {"--no_advantage_std_norm": True, "--advantage_estimator": "reinforce_baseline"},
            {"scale_rewards": "none"},
        ),
        (
            {"--enable_vllm_is_correction": True},
            {"importance_correction_min": 0.5, "importance_correction_max": 5.0},
        ),
    ],
)
def test_no_order_of_keys_changes_what_is_trained(keys: dict[str, Any], expected: dict[str, Any]) -> None:
    project = "openrlhf" if any(key.startswith("--") for key in keys) else "verl"
    for pairs in (list(keys.items()), list(keys.items())[::-1]):
        settings = Imported({key.removeprefix("--"): value for key, value in pairs}, project).settings()
        assert {key: settings.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("arguments", "alpha"), [("r=16", 8), ("r=16, lora_alpha=64", 64), ("lora_alpha=64, r=16", 64)]
)
def test_an_adapter_of_a_script_has_the_defaults_of_peft(tmp_path: Path, arguments: str, alpha: int) -> None:
    script = f"config = LoraConfig({arguments})\nGRPOTrainer('m', args=GRPOConfig(beta=0.1))\n"
    settings = imported(tmp_path, "run.py", script).settings()
    assert (settings["use_peft"], settings["lora_r"]) == (True, 16)
    assert (settings["lora_alpha"], settings.get("lora_dropout", 0.0)) == (alpha, 0.0)
