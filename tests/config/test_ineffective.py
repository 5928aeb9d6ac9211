"""Keys without effect are named, and only these: weights are compared bit for bit.

A tiny policy is updated on given samples (quick), and the embedded model is trained (slow).
"""

import json
from typing import Any

import pytest
import torch

from tests.conftest import make_policy
from tests.support.runs import rows, run, weights, words
from tests.support.update import make_samples
from whetstone.config import build, load, make_plan, without_effect
from whetstone.model.lora import add_lora
from whetstone.model.policy import Policy
from whetstone.model.reference import Reference
from whetstone.types import Group, Problem
from whetstone.update.updater import Updater

SMALL = {
    "max_steps": 4,
    "max_completion_length": 16,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "num_generations": 3,
    "prompts_per_step": 2,
    "device": "cpu",
    "datasets": {"chain_sum": {}},
}
TWICE: dict[str, Any] = {"num_iterations": 2}
RISING = {"entropy_coef": 9.0}  # probabilities of bad completions rise, too
KL: dict[str, Any] = {"beta": 0.5, "num_iterations": 2}
GAE: dict[str, Any] = {"advantage": "gae", "num_iterations": 2, "critic_learning_rate": 0.01}
LORA: dict[str, Any] = {"use_peft": True, "lora_target_modules": "all-linear"}
# (what else is set, keys that do nothing then)
IDLE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"epsilon": 0.1, "epsilon_high": 0.28, "delta": 4.0}),
    ({"loss_type": "gspo"}, {"epsilon": 3e-4, "epsilon_high": 4e-4, "importance_sampling_level": "sequence"}),
    ({"beta": 0.1, "kl_in": "reward"}, {"epsilon": 0.1, "delta": 4.0}),
    ({"loss_type": "cispo"}, {"epsilon_high": 3.0, "importance_sampling_level": "sequence"}),
    ({"loss_type": "cispo", **TWICE}, {"epsilon": 0.01, "delta": 1.01}),
    ({"loss_type": "sapo", **TWICE}, {"epsilon": 0.01, "epsilon_high": 0.02, "delta": 1.03}),
    (
        {"loss_type": "reinforce", **TWICE},
        {"epsilon": 0.01, "epsilon_high": 0.02, "delta": 1.03, "importance_sampling_level": "sequence"},
    ),
    ({"loss_type": "gspo", **TWICE}, {"importance_sampling_level": "sequence"}),
    (
        {"loss_type": "sft", **TWICE},
        {
            "advantage": "rloo", "scale_rewards": "none", "epsilon": 0.01, "num_generations": 2,
            "importance_sampling_level": "sequence", "turn_credit": "turn", "turn_discount": 0.5,
        },
    ),
    (TWICE, {"sapo_temperature_pos": 3.0, "sapo_temperature_neg": 3.0}),
    (
        TWICE,
        {
            "kl_reference": "moving", "kl_estimator": "k1", "kl_in": "reward",
            "use_bias_correction_kl": False, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.1,
        },
    ),
    ({**KL, "kl_in": "reward"}, {"use_bias_correction_kl": False}),
    ({**KL, "kl_estimator": "full"}, {"use_bias_correction_kl": False}),
    (KL, {"ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.1}),
    (KL, {"kl_reference": "moving", "ref_model_sync_steps": 4, "ref_model_mixup_alpha": 0.1}),
    (
        {},
        {
            "beta": 5.0, "kl_reference": "rollout", "kl_estimator": "k2", "target_kl": 0.1,
            "use_bias_correction_kl": False,
        },
    ),
    ({}, {"beta": 5.0, "kl_reference": "rollout"}),
    ({"entropy_coef": 0.1}, {"entropy_coef_max": 0.6}),
    ({}, {"off_policy_mask_threshold": 0.1}),
    (TWICE, {"importance_correction_min": 1.5, "importance_correction_max": 2.0}),
    ({"advantage": "reinforce_pp"}, {"scale_rewards": "none"}),
    ({**GAE, "num_iterations": 1}, {"scale_rewards": "batch", "turn_discount": 0.5, "value_clip": 0.01}),
    ({**GAE, "critic": "model"}, {"value_coef": 5.0}),
    (
        TWICE,
        {
            "critic": "model", "critic_learning_rate": 0.1, "critic_warmup_steps": 9, "gamma": 0.5,
            "gae_lambda": 0.5, "value_clip": 0.01, "value_coef": 5.0,
        },
    ),
    (TWICE, {"turn_credit": "turn", "turn_discount": 0.5}),
    (
        {},
        {
            "lora_r": 4, "lora_alpha": 9, "lora_dropout": 0.1, "lora_target_modules": ["q_proj"],
            "use_rslora": True, "use_dora": True,
        },
    ),
    ({**LORA, "lora_r": 1}, {"use_rslora": True}),
    ({}, {"warmup_steps": 3, "warmup_ratio": 0.5, "lr_scheduler_kwargs": {"a": 1}, "num_train_epochs": 7.0}),
    ({"lr_scheduler_type": "linear", "warmup_steps": 3}, {"warmup_ratio": 0.1}),
    ({"beta": 0.1}, {"skip_zero_advantages": False}),
    ({}, {"bf16": True, "bf16_rounding": "stochastic", "cpu_offload": "all", "sequence_parallel": True}),
    ({}, {"sft_learning_rate": 0.1}),
    ({}, {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 3}),
]  # fmt: skip
# (what else is set, keys of which each alone changes the weights)
ACTIVE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (TWICE, {"epsilon": 1e-3, "epsilon_high": 0.0}),
    ({**TWICE, **RISING, "epsilon_high": 0.0}, {"delta": 1.001}),
    (TWICE, {"importance_sampling_level": "sequence", "advantage": "rloo", "loss_type": "grpo"}),
    ({"loss_type": "cispo", **TWICE}, {"epsilon_high": 1.0}),
    ({"loss_type": "sapo", **TWICE}, {"sapo_temperature_pos": 3.0, "sapo_temperature_neg": 3.0}),
    ({"loss_type": "reinforce", **KL}, {"importance_sampling_level": "sequence"}),
    ({}, {"scale_rewards": "batch", "entropy_coef": 0.1, "beta": 0.1, "top_entropy_quantile": 0.5}),
    ({"beta": 0.1, "kl_reference": "rollout"}, {"kl_estimator": "k1", "num_iterations": 2}),
    (KL, {"kl_reference": "rollout", "kl_estimator": "k1", "kl_in": "reward", "target_kl": 1e-4}),
    (KL, {"use_bias_correction_kl": False}),
    (
        {**KL, "kl_reference": "moving", "ref_model_sync_steps": 2},
        {"ref_model_sync_steps": 3, "ref_model_mixup_alpha": 0.1},
    ),
    (
        {"entropy_coef": 0.1, "entropy_target": 9.0},
        {"entropy_coef_max": 0.01, "entropy_target": 0.1},
    ),
    (TWICE, {"off_policy_mask_threshold": 1e-4, "num_iterations": 1, "max_grad_norm": 0.01}),
    (
        {"importance_correction": "token_truncate"},
        {"importance_correction_min": 1.5, "importance_correction_max": 0.5},
    ),
    (GAE, {"gamma": 0.5, "gae_lambda": 0.5, "value_clip": 1e-4, "value_coef": 5.0, "critic": "model"}),
    (GAE, {"scale_rewards": "none", "critic_learning_rate": 0.1, "critic_warmup_steps": 1}),
    ({**GAE, "critic": "model"}, {"critic_learning_rate": 0.1}),
    (LORA, {"lora_r": 4, "lora_alpha": 9, "lora_dropout": 0.5, "lora_target_modules": ["q_proj"]}),
    (LORA, {"use_rslora": True, "use_dora": True}),
    (
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
        {"warmup_steps": 2, "warmup_ratio": 0.5, "lr_scheduler_kwargs": {"min_lr_rate": 0.9}},
    ),
    ({}, {"weight_decay": 1.0, "adam_beta1": 0.5, "adam_beta2": 0.5, "adam_epsilon": 0.1}),
    ({}, {"optim": "adamw_8bit", "learning_rate": 0.1, "lr_scheduler_type": "linear", "temperature": 0.5}),
]


def some_slow(cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[Any]:
    """Every third case is quick."""
    return [
        pytest.param(case, id=",".join(case[1]), marks=[pytest.mark.slow] if number % 3 else [])
        for number, case in enumerate(cases)
    ]


def named(config, **options) -> dict[str, str]:
    return without_effect(config, make_plan(config, num_problems=100), **options)


def updated(settings: dict[str, Any]) -> list[torch.Tensor]:
    """The weights after two batches."""
    config, policy = build({**SMALL, **settings}), make_policy()
    if config.model.use_peft:
        torch.manual_seed(3)
        policy = Policy(add_lora(policy.model, config.model, None), policy.tokenizer, policy.device)
    plan, loss = make_plan(config, num_problems=100), config.loss
    reference = None
    if loss.beta > 0 and loss.kl_reference != "rollout":
        reference = Reference.from_policy(policy, policy, moving=loss.kl_reference == "moving")
    updater = Updater(policy, config, plan, reference)
    problem, size = Problem(id="t/train/0", task="t", messages=(), answer=None), plan.num_generations
    for step in range(2):
        rollouts = [sample.rollout for sample in make_samples(policy)]  # with the logprobs of now
        groups = [
            Group(problem=problem, rollouts=tuple(rollouts[i : i + size]))
            for i in range(0, len(rollouts), size)
        ]
        updater.update(updater.prepare(updater.pack(groups, step)), step)
    return [parameter.detach() for parameter in policy.parameters()]


def equal(ours: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(ours) == len(others) and all(map(torch.equal, ours, others))


@pytest.mark.parametrize("case", some_slow(IDLE))
def test_a_key_without_effect_is_named_and_has_none(case):
    base, idle = case
    found = named(build({**SMALL, **base, **idle}))
    assert set(idle) <= set(found), set(idle) - set(found)
    before = updated(base)
    assert equal(updated({**base, **idle}), before)
    assert not equal(before, [p.detach() for p in make_policy().parameters()])


@pytest.mark.parametrize("case", some_slow(ACTIVE))
def test_a_key_with_effect_is_not_named(case):
    base, active = case
    before = updated(base)
    for key, value in active.items():
        settings = {**base, key: value}
        assert key not in named(build({**SMALL, **settings})), key
        assert not equal(updated(settings), before), key


# Whole runs of the embedded model: (what else is set, keys that do nothing then).
RUNS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"reward_funcs": "[FOLDER/own.py:pay]"},
        {
            "overlong_buffer_length": 4, "reward_correct": 2, "reward_wrong": -3, "reward_no_answer": -2,
            "developer_role": "user", "use_reasoning_format": True, "base_reward_weight": 3,
            "turn_discount": 0.5, "perfect_reward_weight": 3, "test_reward": "all",
            "max_tests_per_problem": 1, "ray_address": "x", "sandbox_output_kb": 9,
            "sandbox_pool": "ray", "sandbox_time_limit_s": 1, "sandbox_memory_mb": 99, "max_turns": 2,
            "tool_call_format": "code_block", "max_tool_calling_iterations": 1,
            "max_observation_length": 9, "environment_timeout_s": 9, "environment_memory_mb": 99,
            "agent_max_length": 99, "turn_credit": "turn", "full_determinism": True,
            "prompt_template": "{question}", "eval_dataset_seed": 9, "fixed_eval_steps": 1,
            "eval_samples_per_problem": 2, "eval_temperature": 0.5, "eval_greedy": False,
            "per_device_eval_batch_size": 3, "dynamic_sampling_max_rounds": 9, "server_port": 9,
            "server_timeout_s": 9, "server_args": "[a]", "weight_transfer": "disk",
            "vllm_mode": "colocate", "attn_implementation": "eager", "save_steps": 1,
            "server_devices": "['3']", "num_train_epochs": 9,
            "per_device_train_batch_size": 3, "wandb_project": "x",
            "wandb_tags": "a", "hub_model_id": "a/b", "bf16": True,
            "epsilon": 0.1, "epsilon_high": 0.3, "lora_r": 4, "gamma": 0.5, "sft_learning_rate": 0.1,
        },
    ),
    (
        {
            "datasets": "{rows: {config: {path: FOLDER/rows.jsonl}}}", "apply_chat_template": False,
            "advantage": "gae", "importance_correction": "none", "max_steps": 1, "eval_num_samples": 2,
            "eval_temperature": 0, "developer_prompt": "'Answer briefly.'",
            "reward_funcs": "[FOLDER/own.py:pay]",
        },
        {
            "dataset_size": 7, "chat_template_kwargs": "{a: 1}", "chat_template": "x",
            "dynamic_sampling": True, "async_rollouts": 1, "eval_greedy": False, "reward_correct": 3,
            "value_clip": 0.5,
        },
    ),
]  # fmt: skip

PAY = """\
def pay(completions, **columns):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(map(ord, text)) % 7 / 7 for text in texts]
"""


@pytest.mark.slow
def test_sampling_off_the_policy_is_not_taken_for_on_policy():
    # top_k renormalizes the sampler's logprobs; one batch ahead brings an importance correction by default
    once = {"max_steps": 1, "off_policy_mask_threshold": 0.1}
    assert "off_policy_mask_threshold" in named(build(once))
    assert "off_policy_mask_threshold" not in named(build({**once, "top_k": 5}))
    assert "async_rollouts" not in named(build({"max_steps": 1, "async_rollouts": 1}))
    settings = {"max_steps": 1, "async_rollouts": 1, "importance_correction": "none"}
    assert "async_rollouts" in named(build(settings))


@pytest.mark.parametrize(("base", "idle"), RUNS, ids=["generated", "rows"])
def test_a_whole_run_is_the_same_without_its_idle_keys(tmp_path, base, idle):
    (tmp_path / "own.py").write_text(PAY)
    lines = [json.dumps({"prompt": f"{n} + 1?", "answer": str(n + 1)}) for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    base = {"max_steps": 2, "max_completion_length": 8, "eval_num_samples": 0, "save_strategy": "no", **base}
    base = {key: str(value).replace("FOLDER", str(tmp_path)) for key, value in base.items()}
    found = named(load(None, words(tmp_path, **base, **idle)).config, on_cpu=True)
    assert set(idle) <= set(found), set(idle) - set(found)
    assert run(tmp_path / "with", **base, **idle)["steps"] == int(base["max_steps"])
    run(tmp_path / "without", **base)
    before, after = (weights(tmp_path / name / "run" / "final_model") for name in ("without", "with"))
    assert equal(list(before.values()), list(after.values()))
    assert rows(tmp_path / "with", "train")[0]["grad_norm"] > 0
