"""Names from other trainers, of keys and of their values, and what they are taken for here. One table;
`load.py` applies it and the run says so.
"""

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
    "wandb_name": "run_name",
    "experiment_name": "run_name",
    "project_name": "wandb_project",
    "entropy_coeff": "entropy_coef",
    "per_rollout_size": "prompts_per_step",
    "max_eps": "epsilon_high",
    "min_eps": "epsilon",
    "checkpoint_interval": "save_steps",
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
    # steps_per_generation.
    return {"steps_per_generation": int(value) * int(flat.get("gradient_accumulation_steps", 1))}


def _max_model_len(value: Any, flat: dict[str, Any]) -> dict[str, Any]:
    # The whole context: what is not the completion is left for the prompt.
    completion = int(flat.get("max_completion_length", flat.get("max_new_tokens", 512)))
    if int(value) <= completion:
        raise ValueError(
            f"max_model_len is {value}, which leaves no room for a prompt beside {completion} new tokens: "
            "raise it or lower max_completion_length"
        )
    return {"max_prompt_length": int(value) - completion}


def _data_path(value: Any, flat: dict[str, Any]) -> dict[str, Any]:
    datasets = flat.get("datasets") or {"math": {}}
    if not isinstance(datasets, dict) or len(datasets) != 1:
        raise ValueError(
            "data_path names one file, but datasets has several tasks: give each its own config: {path: ...}"
        )
    ((name, spec),) = datasets.items()
    spec = dict(spec or {})
    return {"datasets": {name: {**spec, "config": {**(spec.get("config") or {}), "path": value}}}}


def _offload_model(value: Any, flat: dict[str, Any]) -> dict[str, Any]:
    return {"cpu_offload": "all" if value else "none"}


# other name -> a function of (its value, all keys of the file) that gives our keys
CONVERTED: dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {
    "use_wandb": _use_wandb,
    "resume_steps": _resume_steps,
    "updates_per_rollout": _updates_per_rollout,
    "max_model_len": _max_model_len,
    "data_path": _data_path,
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
WITHOUT_EFFECT: dict[str, str] = {}
