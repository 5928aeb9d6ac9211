"""Names from other trainers, of keys, of their values and of sections, and what they are taken for here.

`load.py` applies these tables and the run says so. docs/coming_from.md shows them project by project.
"""

import json
from collections.abc import Callable
from typing import Any

# other name -> our key
RENAMED: dict[str, str] = {
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
    "eval_steps": "fixed_eval_steps",
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
    "vllm_max_model_len": "vllm_max_model_length",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "tensor_model_parallel_size": "vllm_tensor_parallel_size",
    "vllm_importance_sampling_mode": "sampler_correction",
    "vllm_importance_sampling_clip_min": "sampler_correction_min",
    "vllm_importance_sampling_clip_max": "sampler_correction_max",
    "vllm_importance_sampling_cap": "sampler_correction_max",
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


def _data_path(value: Any, flat: dict[str, Any]) -> dict[str, Any]:
    datasets = _specs(flat) or {"math": {}}
    if len(datasets) != 1:
        raise ValueError(
            "data_path names one file, but datasets has several tasks: give each its own config: {path: ...}"
        )
    ((name, spec),) = datasets.items()
    return {"datasets": {name: _with(spec, path=value)}}


def _max_samples(value: Any, flat: dict[str, Any]) -> dict[str, Any]:
    # So many rows of each task that reads rows, and so many problems of those that are generated.
    datasets = {
        name: _with(spec, max_samples=value) if {"path", "dataset"} & set(spec.get("config") or {}) else spec
        for name, spec in _specs(flat).items()
    }
    return {"datasets": datasets, "dataset_size": value}


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | str) or not str(value).isdecimal():
        raise ValueError(f"'{value}' is not a whole number")
    return int(value)


def _specs(flat: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """`datasets` as it was written: a mapping or JSON text."""
    datasets = flat.get("datasets") or {}
    if isinstance(datasets, str):
        datasets = json.loads(datasets)
    if not isinstance(datasets, dict):
        raise ValueError("datasets is not a mapping of task names")
    return {name: dict(spec or {}) for name, spec in datasets.items()}


def _with(spec: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {**spec, "config": {**(spec.get("config") or {}), **settings}}


def _offload_model(value: Any, flat: dict[str, Any]) -> dict[str, Any]:
    return {"cpu_offload": "all" if value else "none"}


# other name -> a function of (its value, all keys: ours and as they were written) that gives our keys.
# They are applied in this order, after plain names.
CONVERTED: dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {
    "use_wandb": _use_wandb,
    "resume_steps": _resume_steps,
    "per_rollout_size": _per_rollout_size,
    "updates_per_rollout": _updates_per_rollout,
    "max_model_len": _max_model_len,
    "data_path": _data_path,
    "max_samples": _max_samples,
    "offload_model": _offload_model,
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

# known elsewhere, without a meaning here, and why
WITHOUT_EFFECT: dict[str, str] = {
    "num_processes": "the launcher says how many processes there are (torchrun --nproc_per_node, "
    "accelerate launch --num_processes)",
}

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
