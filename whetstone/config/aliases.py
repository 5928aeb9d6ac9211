"""Names from other trainers, of keys, of their values and of sections, and what they are taken for here.

TRL's own are in `trl_names.py`, keys of data sets in `data_keys.py`. docs/coming_from.md shows all of them.
"""

from typing import Any

from whetstone.config import trl_names
from whetstone.config.trl_names import NO_EFFECT, Converter, by_name, eval_strategy

_OTHER_NAMES = {
    "model_name_or_path": "model model_name model_path",
    "num_generations": "num_return_sequences responses_per_prompt",
    "beta": "kl_coef",
    "max_completion_length": "max_new_tokens",
    "temperature": "generation_temp",
    "num_train_epochs": "num_epochs",
    "learning_rate": "lr",
    "eval_num_samples": "simple_eval_problems eval_problems max_test_problems",
    "eval_samples_per_problem": "repeat_eval_problems eval_k",
    "run_name": "experiment_name",
    "wandb_project": "project_name",
    "entropy_coef": "entropy_coeff",
    "epsilon_high": "max_eps",
    "epsilon": "min_eps clip_range",
    "save_steps": "checkpoint_interval",
    "off_policy_mask_threshold": "off_policy_threshold",
    "use_peft": "use_lora lora",
    "lora_r": "lora_rank",
    "server_max_model_length": "vllm_max_model_len",
    "server_gpu_memory_utilization": "gpu_memory_utilization",
    "server_tensor_parallel_size": "tensor_model_parallel_size",
    "developer_prompt": "system_prompt",
}
# other name -> our key
RENAMED: dict[str, str] = trl_names.RENAMED | by_name(_OTHER_NAMES)


def _updates_per_rollout(value: Any, flat: dict[str, Any]) -> dict[str, Any]:
    # RL2 and its kin cut one batch of rollouts into so many updates; TRL says the same with
    # steps_per_generation. Their batch is per_rollout_size prompts, ours is counted by update.
    keys = {"steps_per_generation": _count(value) * _count(flat.get("gradient_accumulation_steps", 1))}
    if "per_rollout_size" in flat:
        keys["prompts_per_step"] = _prompts_per_update(flat["per_rollout_size"], value)
    return keys


def _prompts_per_update(size: Any, num_updates: Any) -> int:
    prompts, updates = _count(size), _count(num_updates)
    if updates < 1 or prompts % updates:
        raise ValueError(
            f"per_rollout_size is {prompts}, which does not divide into the {updates} updates of "
            f"updates_per_rollout: set it to {max(1, round(prompts / max(1, updates))) * max(1, updates)}"
        )
    return prompts // updates


def _max_model_len(value: Any, flat: dict[str, Any]) -> dict[str, Any]:
    # The whole context: what is not the completion is left for the prompt.
    completion = _count(flat.get("max_completion_length", 512))
    if _count(value) <= completion:
        raise ValueError(
            f"max_model_len is {value}, which leaves no room for a prompt beside {completion} new tokens: "
            "raise it or lower max_completion_length"
        )
    return {"max_prompt_length": _count(value) - completion}


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | str) or not str(value).isdecimal():
        raise ValueError(f"'{value}' is not a whole number")
    return int(value)


def _pass_at_k(value: Any, flat: dict[str, Any]) -> dict[str, Any]:
    # A switch, or how many completions of each problem: pass@k is reported wherever there are several.
    if isinstance(value, bool) or value is None:
        several = flat.get("eval_samples_per_problem", 1) != 1
        return {"eval_samples_per_problem": 4} if value and not several else {}
    return {"eval_samples_per_problem": _count(value)}


# other name -> a function of (its value, all keys: ours and as they were written) that gives our keys.
# They are applied in this order, after plain names.
CONVERTED: dict[str, Converter] = {
    **trl_names.CONVERTED,
    "torch_dtype": trl_names.CONVERTED["dtype"],
    "evaluation_strategy": eval_strategy,
    "do_sample": lambda value, flat: trl_names.generation_kwargs({"do_sample": value}, flat),
    "use_wandb": lambda value, flat: {"report_to": "wandb" if value else "none"},
    "resume_steps": lambda value, flat: {"resume_from_checkpoint": f"checkpoint-{value}"} if value else {},
    "per_rollout_size": lambda value, flat: {
        "prompts_per_step": _prompts_per_update(value, flat.get("updates_per_rollout", 1))
    },
    "updates_per_rollout": _updates_per_rollout,
    "max_model_len": _max_model_len,
    "offload_model": lambda value, flat: {"cpu_offload": "all" if value else "none"},
    "perfect_bonus": lambda value, flat: {
        "perfect_reward_weight": float(value) if isinstance(value, bool) else value
    },
    "eval_pass_at_k": _pass_at_k,
    "use_qlora": lambda value, flat: {"use_peft": True, "load_in_4bit": True} if value else {},
}

_PAGING = " Paging is cpu_offload: optimizer, which keeps the states in the memory of the CPU."
# our key -> another name of one of its values -> our name, and what else there is to say
VALUES: dict[str, dict[str, tuple[str, str]]] = {
    "optim": {
        "adamw": ("adamw_torch", ""),
        "adamw_hf": ("adamw_torch", ""),
        "adamw_torch_fused": ("adamw_torch", ""),
        "adamw_bnb_8bit": ("adamw_8bit", ""),
        "paged_adamw_8bit": ("adamw_8bit", _PAGING),
        "paged_adamw_32bit": ("adamw_torch", _PAGING),
    },
}

# another name of a reward function -> ours: those of TRL's own script and of the course
REWARDS: dict[str, str] = {
    "accuracy_reward": "accuracy",
    "think_format_reward": "format",
    "format_reward": "format",
}

_WHY_NOT = {
    "the launcher says how many processes there are (torchrun --nproc_per_node)": """
        num_processes num_machines cuda_visible_devices use_deepspeed deepspeed_config""",
    "completions are padded by the tokenizer's token": "pad_token_id",
    "advantages are scaled as scale_rewards says": "whiten_rewards",
    "GPUs and options of servers are server_devices and server_args": """
        vllm_device vllm_dtype remote_gen_model_url""",
    "it belongs to a reward function of that project": """
        code_language code_eval_test_batch_size code_eval_scoring_mode code_provider
        parallel_code_exec_per_proc e2b_router_url morph_router_url ioi_provider cosine_min_value_wrong
        cosine_max_value_wrong cosine_min_value_correct cosine_max_value_correct cosine_max_len
        repetition_n_grams repetition_max_penalty max_completion_len soft_punish_cache""",
    NO_EFFECT["hub_strategy"]: """
        callbacks benchmarks hub_model_revision overwrite_hub_revision push_to_hub_revision""",
    NO_EFFECT["log_completions"]: "logging_dir wandb_log_unique_prompts",
    NO_EFFECT["use_liger_kernel"]: """
        use_liger_loss half_precision_backend fp16_opt_level use_ipex jit_mode_eval""",
    NO_EFFECT["shuffle_dataset"]: "group_by_length dataset_num_proc shuffle",
    NO_EFFECT["save_only_model"]: "save_safetensors",
}
# known elsewhere, without a meaning here, and why
WITHOUT_EFFECT: dict[str, str] = NO_EFFECT | by_name(_WHY_NOT)

# known elsewhere, but not supported: (values that ask for nothing, why)
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    **trl_names.REFUSED,
    "dataset_mixture": ((), "give each data set its own entry in datasets"),
    "dataset_mixer": ((), "give each data set its own entry in datasets"),
    "use_value_baseline": ((), "a critic is advantage: gae"),
    "lora_bias": (("none",), "beside an adapter no biases are trained"),
}

# Names that only the math project's flat files have: beside them lora_r and the like mean LoRA.
MATH_PROJECT = frozenset({"model_path", "num_return_sequences", "kl_coef", "num_epochs", "max_new_tokens"})

# A section of a nested file -> its own short names -> a key of ours or of the tables above. Other keys inside
# it are read as they are.
SECTIONS: dict[str, dict[str, str]] = {
    "model": {"path": "model_name_or_path", "name": "model_name_or_path"},
    "lora": {
        "enabled": "use_peft",
        "r": "lora_r",
        "rank": "lora_r",
        "alpha": "lora_alpha",
        "dropout": "lora_dropout",
        "target_modules": "lora_target_modules",
        "bias": "lora_bias",
        "task_type": "lora_task_type",
    },
    "data": {"path": "data_path"},
    "reward": {"correct": "reward_correct", "wrong": "reward_wrong", "no_answer": "reward_no_answer"},
    "grpo": {},
    "training": {},
    "generation": {},
    "evaluation": {},
    "logging": {},
    "system": {},
    "output": {"dir": "output_dir"},
}
