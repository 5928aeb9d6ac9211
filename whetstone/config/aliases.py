"""Names from other trainers, of keys, of their values and of sections, and what they are taken for here.

TRL's own are in `trl_names.py`, keys of data sets in `data_keys.py`. `load.py` applies these tables and the
run says so. docs/coming_from.md shows them project by project.
"""

from typing import Any

from whetstone.config import trl_names
from whetstone.config.trl_names import Converter, eval_strategy

# other name -> our key
RENAMED: dict[str, str] = {
    **trl_names.RENAMED,
    "model": "model_name_or_path",
    "model_name": "model_name_or_path",
    "model_path": "model_name_or_path",
    "num_return_sequences": "num_generations",
    "responses_per_prompt": "num_generations",
    "kl_coef": "beta",
    "max_new_tokens": "max_completion_length",
    "generation_temp": "temperature",
    "num_epochs": "num_train_epochs",
    "lr": "learning_rate",
    "simple_eval_problems": "eval_num_samples",
    "repeat_eval_problems": "eval_samples_per_problem",
    "experiment_name": "run_name",
    "project_name": "wandb_project",
    "entropy_coeff": "entropy_coef",
    "max_eps": "epsilon_high",
    "min_eps": "epsilon",
    "checkpoint_interval": "save_steps",
    "off_policy_threshold": "off_policy_mask_threshold",
    "use_lora": "use_peft",
    "lora": "use_peft",
    "vllm_max_model_len": "server_max_model_length",
    "gpu_memory_utilization": "server_gpu_memory_utilization",
    "tensor_model_parallel_size": "server_tensor_parallel_size",
    "system_prompt": "developer_prompt",
    "lora_rank": "lora_r",
    "eval_k": "eval_samples_per_problem",
    "eval_problems": "eval_num_samples",
    "max_test_problems": "eval_num_samples",
}


def _use_wandb(value: Any, flat: dict[str, Any]) -> dict[str, Any]:
    return {"report_to": "wandb" if value else "none"}


def _resume_steps(value: Any, flat: dict[str, Any]) -> dict[str, Any]:
    return {"resume_from_checkpoint": f"checkpoint-{value}"} if value else {}


def _updates_per_rollout(value: Any, flat: dict[str, Any]) -> dict[str, Any]:
    # RL2 and its kin cut one batch of rollouts into so many updates; TRL says the same with
    # steps_per_generation. Their batch is per_rollout_size prompts, ours is counted by update.
    made: dict[str, Any] = {
        "steps_per_generation": _count(value) * _count(flat.get("gradient_accumulation_steps", 1))
    }
    if "per_rollout_size" in flat:
        made["prompts_per_step"] = _prompts_per_update(_count(flat["per_rollout_size"]), _count(value))
    return made


def _per_rollout_size(value: Any, flat: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompts_per_step": _prompts_per_update(_count(value), _count(flat.get("updates_per_rollout", 1)))
    }


def _prompts_per_update(prompts: int, updates: int) -> int:
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


def _offload_model(value: Any, flat: dict[str, Any]) -> dict[str, Any]:
    return {"cpu_offload": "all" if value else "none"}


def _perfect_bonus(value: Any, flat: dict[str, Any]) -> dict[str, Any]:
    return {"perfect_reward_weight": float(value) if isinstance(value, bool) else value}


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
    "use_wandb": _use_wandb,
    "resume_steps": _resume_steps,
    "per_rollout_size": _per_rollout_size,
    "updates_per_rollout": _updates_per_rollout,
    "max_model_len": _max_model_len,
    "offload_model": _offload_model,
    "perfect_bonus": _perfect_bonus,
    "eval_pass_at_k": _pass_at_k,
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

_LAUNCHER = (
    "the launcher says how many processes there are (torchrun --nproc_per_node, accelerate launch "
    "--num_processes)"
)
_SERVERS = "GPUs and options of servers are server_devices and server_args"
_REWARDS = "it belongs to a reward function of that project"
# known elsewhere, without a meaning here, and why
WITHOUT_EFFECT: dict[str, str] = {
    **trl_names.NO_EFFECT,
    "num_processes": _LAUNCHER,
    "num_machines": _LAUNCHER,
    **dict.fromkeys(("vllm_device", "vllm_dtype", "remote_gen_model_url"), _SERVERS),
    **dict.fromkeys(
        ("callbacks", "benchmarks", "hub_model_revision", "overwrite_hub_revision", "push_to_hub_revision"),
        trl_names.NO_EFFECT["push_to_hub"],
    ),
    **dict.fromkeys(
        (
            *("code_language", "code_eval_test_batch_size", "code_eval_scoring_mode", "code_provider"),
            *("parallel_code_exec_per_proc", "e2b_router_url", "morph_router_url", "ioi_provider"),
            *("cosine_min_value_wrong", "cosine_max_value_wrong", "cosine_min_value_correct"),
            *("cosine_max_value_correct", "cosine_max_len", "repetition_n_grams", "repetition_max_penalty"),
            *("max_completion_len", "soft_punish_cache"),
        ),
        _REWARDS,
    ),
    **dict.fromkeys(("logging_dir", "wandb_log_unique_prompts"), trl_names.NO_EFFECT["log_completions"]),
    **dict.fromkeys(
        ("use_liger_loss", "half_precision_backend", "fp16_opt_level", "use_ipex", "jit_mode_eval"),
        trl_names.NO_EFFECT["use_liger_kernel"],
    ),
    **dict.fromkeys(("group_by_length", "dataset_num_proc"), trl_names.NO_EFFECT["shuffle_dataset"]),
    "save_safetensors": trl_names.NO_EFFECT["save_only_model"],
}

# known elsewhere, but can't be had: (values that ask for nothing, why)
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    **trl_names.REFUSED,
    "use_qlora": ((), "weights are trained from bf16 or float32: set use_peft=true bf16=true"),
    "dataset_mixture": ((), "give each data set its own entry in datasets"),
    "dataset_mixer": ((), "give each data set its own entry in datasets"),
}

# Names that only the math project's flat files have: beside them lora_r and the like mean LoRA.
MATH_PROJECT = frozenset({"model_path", "num_return_sequences", "kl_coef", "num_epochs", "max_new_tokens"})
LORA_SETTINGS = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")

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
    },
    "data": {"path": "data_path"},
    "reward": {"correct": "reward_correct", "wrong": "reward_wrong", "no_answer": "reward_no_answer"},
    "grpo": {},
    "training": {},
    "generation": {},
    "evaluation": {},
    "logging": {},
    "output": {"dir": "output_dir"},
}
