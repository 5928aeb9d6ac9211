"""Each key of the configuration for TRL: passed on, converted, handled here, or refused.

A key in none of these tables is refused unless it is at its default, so none is ignored silently.
"""

from pathlib import Path
from typing import Any

import torch

from whetstone.algorithm.losses import ratio_level
from whetstone.config import Config, Plan, flatten
from whetstone.errors import UserError
from whetstone.update.micro_batch_size import DEFAULT_TOKENS


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Handed to GRPOConfig under the same name.
PASSED = _names("""
    learning_rate lr_scheduler_type weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm
    num_iterations num_generations max_completion_length temperature top_p min_p beta epsilon delta
    sapo_temperature_pos sapo_temperature_neg ref_model_sync_steps ref_model_mixup_alpha
    use_bias_correction_kl scale_rewards entropy_coef entropy_coef_max
    top_entropy_quantile mask_truncated_completions off_policy_mask_threshold seed
    save_total_limit
""")
# Worked out first (`trl_arguments`).
CONVERTED = _names("""
    bf16 prompts_per_step per_device_train_batch_size gradient_accumulation_steps steps_per_generation
    gradient_checkpointing torch_compile micro_batch_tokens max_steps num_train_epochs
    warmup_ratio warmup_steps top_k
    lr_scheduler_kwargs loss_type importance_sampling_level epsilon_high kl_reference entropy_target
    generation_batch_size rollout_engine vllm_mode server_gpu_memory_utilization
    server_enable_sleep_mode server_max_model_length max_turns max_tool_calling_iterations
    chat_template_kwargs
""")
# Done by whetstone for either trainer, or only a matter of speed.
HANDLED = _names("""
    model_name_or_path device attn_implementation use_peft lora_r lora_alpha lora_dropout
    use_rslora use_dora load_in_4bit lora_target_modules apply_chat_template chat_template
    prompt_template assistant_prefix max_prompt_length max_num_seqs
    datasets eval_datasets dataset_size dataset_seed eval_dataset_seed developer_prompt developer_role
    reward_funcs reward_weights reward_correct reward_wrong reward_no_answer overlong_buffer_length
    reward_timeout_s reward_workers max_reward_failure_fraction
    fixed_eval_steps eval_num_samples eval_samples_per_problem eval_temperature eval_greedy
    eval_num_examples_to_print per_device_eval_batch_size
    output_dir run_name report_to wandb_project wandb_name wandb_entity wandb_tags logging_steps
    log_completions_steps log_tokens_groups
    log_tokens_mb save_strategy
    save_steps auto_resume resume_from_checkpoint overwrite_output_dir preflight watch
    push_to_hub hub_model_id hub_private_repo
    sft_steps sft_learning_rate skip_zero_advantages
    tools environment_timeout_s environment_memory_mb turn_discount agent_max_length full_determinism
""")
# Our loss_type -> TRL's.
LOSSES = {name: name for name in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")} | {"gspo": "grpo"}
# Refused unless at its default, with the reason; a key that stands nowhere here is refused without one.
REFUSED = {
    "advantage": "TRL takes its advantages against the mean of the group only",
    "kl_estimator": "TRL has no KL estimator but k3",
    "kl_in": "TRL puts the KL into the loss only",
    "target_kl": "TRL's beta is fixed",
    "importance_correction": "TRL corrects for another sampler only where vLLM samples",
    "async_rollouts": "TRL's GRPOTrainer samples and learns in turn",
    "max_skipped_steps": "TRL skips no steps",
    "max_observation_length": "TRL drops a result that does not fit, and cuts none",
    "tool_call_format": "TRL reads calls as the chat template writes them",
    "turn_credit": "TRL has one reward for a completion",
    "rollout_func": "such a function samples on whetstone's own engines",
    "agent": "agents ask whetstone's own rollout",
    "load_best_model_at_end": "TRL's evaluations are whetstone's, which its trainer can't choose by",
    "optim": "TRL's 8-bit AdamW is that of bitsandbytes, another one",
}


def kind_of(key: str) -> str:
    """`passed`, `converted` or `handled`; everything else is `refused`."""
    kinds = {"passed": PASSED, "converted": CONVERTED, "handled": HANDLED}
    return next((kind for kind, keys in kinds.items() if key in keys), "refused")


def check_keys(config: Config) -> None:
    """Refuse, by its name, whatever TRL would silently do otherwise."""
    defaults = flatten(Config())
    for key, value in flatten(config).items():
        if kind_of(key) == "refused" and value != defaults[key]:
            reason = REFUSED.get(key, "TRL has no such setting")
            raise _refusal(key, value, reason, defaults[key])
    for name, spec in config.tasks.datasets.items():
        if spec.curriculum is not None:
            key = f"datasets.{name}.curriculum"
            raise _refusal(key, "true", "TRL fixes its problems beforehand", "false")
    loss = config.loss
    if loss.loss_type not in LOSSES:
        raise _refusal("loss_type", loss.loss_type, "TRL has no such loss", "dapo")
    if loss.kl_reference == "rollout":
        raise _refusal("kl_reference", "rollout", "TRL has no KL against the policy that sampled", "base")
    if loss.kl_reference == "moving" and config.model.use_peft:
        raise _refusal("kl_reference", "moving", "TRL has no moving reference beside LoRA", "base")
    rollout = config.rollout
    if rollout.rollout_engine not in ("native", "vllm"):
        raise _refusal("rollout_engine", rollout.rollout_engine, "TRL samples by generate or vLLM", "vllm")
    if rollout.rollout_engine == "vllm" and rollout.vllm_mode != "colocate":
        raise _refusal("vllm_mode", rollout.vllm_mode, "here TRL's vLLM shares the trainer's GPU", "colocate")
    if rollout.num_generations < 2:
        raise _refusal("num_generations", 1, "TRL needs at least two completions of a prompt", 8)


def _refusal(key: str, value: Any, reason: str, instead: Any) -> UserError:
    remedy = f"set {key}={instead}, or use `whet train`"
    return UserError(f"{key}: {value} is not possible with TRL, since {reason}: {remedy}.")


def trl_arguments(config: Config, plan: Plan, folder: Path, device: torch.device) -> dict[str, Any]:
    """The arguments of GRPOConfig for the plan: no shuffling, saving or reporting of TRL's own."""
    flat, loss, is_cpu = flatten(config), config.loss, device.type == "cpu"
    per_device, accumulation = _batch_sizes(config, plan)
    return {
        **{key: flat[key] for key in PASSED},
        "output_dir": str(folder),
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": accumulation * plan.minibatches,
        "max_steps": plan.num_steps,
        "warmup_steps": plan.warmup_steps,
        "lr_scheduler_kwargs": config.update.lr_scheduler_kwargs or None,
        "top_k": config.rollout.top_k or 0,
        "max_tool_calling_iterations": _tool_iterations(config),
        "chat_template_kwargs": config.model.chat_template_kwargs or None,
        "loss_type": LOSSES[loss.loss_type],
        "importance_sampling_level": ratio_level(loss),
        "epsilon_high": loss.upper_epsilon,
        "sync_ref_model": loss.beta > 0 and loss.kl_reference == "moving",
        "use_adaptive_entropy": loss.entropy_target is not None,
        **({} if loss.entropy_target is None else {"entropy_target": loss.entropy_target}),
        **_vllm_arguments(config),
        "use_cpu": is_cpu,
        "bf16": config.model.bf16 and not is_cpu,  # autocast over float32 weights, TRL's way
        "gradient_checkpointing": config.model.gradient_checkpointing is True,
        "torch_compile": config.model.torch_compile is True,
        "dataloader_pin_memory": not is_cpu,
        "optim": "adamw_torch_fused",
        "shuffle_dataset": False,
        "eval_strategy": "no",
        "save_strategy": "no",  # the callback says when: only between batches can TRL resume
        "report_to": "none",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
    }


def _tool_iterations(config: Config) -> int:
    """Turns that may call tools: one more may follow, and `max_turns` counts that as well."""
    iterations = config.environments.max_tool_calling_iterations
    return config.environments.max_turns - 1 if iterations is None else iterations


def _vllm_arguments(config: Config) -> dict[str, Any]:
    """vLLM in TRL's own process; TRL's correction for the sampler's logprobs stays on."""
    if config.rollout.rollout_engine != "vllm":
        return {}
    utilization = config.engines.server_gpu_memory_utilization
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3 if utilization is None else utilization,
        "vllm_enable_sleep_mode": config.engines.server_enable_sleep_mode,
        "vllm_max_model_length": config.engines.server_max_model_length,
    }


def _batch_sizes(config: Config, plan: Plan) -> tuple[int, int]:
    """(completions in a micro-batch, micro-batches in an optimizer step)."""
    rollout = config.rollout
    if rollout.prompts_per_step is None:
        return rollout.per_device_train_batch_size, rollout.gradient_accumulation_steps
    completions = plan.completions_per_batch // plan.minibatches
    tokens = config.update.micro_batch_tokens
    most = max(1, (DEFAULT_TOKENS if tokens == "auto" else tokens) // rollout.max_completion_length)
    size = max(n for n in range(1, completions + 1) if completions % n == 0 and n <= most)
    return size, completions // size
