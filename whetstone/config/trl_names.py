"""Every name of TRL 1.16's GRPOConfig, ModelConfig and ScriptArguments that is not simply a key of ours.

- `RENAMED`: a key of ours under another name.
- `CONVERTED`: a function of (its value, all keys) that gives our keys.
- `NO_EFFECT`: nothing here depends on it, and why; noted in one line for all of them.
- `REFUSED`: nothing here can do it, and why; accepted where the value asks for nothing.

`tests/config/test_trl_names.py` reads TRL's own classes and fails if a name has no decision. Other trainers'
names are in `aliases.py`. Imports nothing of TRL.
"""

from collections.abc import Callable, Mapping
from typing import Any

from whetstone.config.base import MAX_SECONDS

Converter = Callable[[Any, dict[str, Any]], dict[str, Any]]


def by_name(groups: Mapping[str, str]) -> dict[str, str]:
    """`{x: "a b"}` -> `{a: x, b: x}`."""
    return {name: value for value, names in groups.items() for name in names.split()}


RENAMED: dict[str, str] = {
    "num_generations_eval": "eval_samples_per_problem",
    "vllm_importance_sampling_mode": "importance_correction",
    "vllm_importance_sampling_clip_min": "importance_correction_min",
    "vllm_importance_sampling_clip_max": "importance_correction_max",
    "vllm_importance_sampling_cap": "importance_correction_max",
    "vllm_server_base_url": "server_base_url",
    "vllm_server_host": "server_host",
    "vllm_server_port": "server_port",
    "vllm_server_timeout": "server_timeout_s",
    "vllm_group_port": "server_group_port",
    "vllm_gpu_memory_utilization": "server_gpu_memory_utilization",
    "vllm_max_model_length": "server_max_model_length",
    "vllm_tensor_parallel_size": "server_tensor_parallel_size",
    "vllm_enable_sleep_mode": "server_enable_sleep_mode",
    "project": "wandb_project",
    "eval_steps": "fixed_eval_steps",
    "data_seed": "dataset_seed",
}


def _dtype(value: Any, flat: dict[str, Any]) -> dict[str, Any]:
    """The precision of the weights; `bf16`, where it is given, says it already."""
    name = str(value).removeprefix("torch.").lower()
    if value is None or name == "auto" or flat.get("bf16") is not None or flat.get("fp16") is True:
        return {}
    known = {"float32": False, "fp32": False, "bfloat16": True, "bf16": True, "float16": True, "fp16": True}
    if name not in known:
        raise ValueError(f"'{value}' is not a precision to train in: write bfloat16 or float32")
    return {"bf16": known[name]}


def _fp16(value: Any, flat: dict[str, Any]) -> dict[str, Any]:
    """bf16 has the same size and speed and needs no loss scaling."""
    if not isinstance(value, bool | None):
        raise ValueError(f"'{value}' is not true or false")
    return {"bf16": True} if value else {}


def _model_init_kwargs(value: Any, flat: dict[str, Any]) -> dict[str, Any]:
    options = _mapping(value, "dtype torch_dtype attn_implementation use_cache device_map low_cpu_mem_usage")
    ours = _dtype(options.get("dtype", options.get("torch_dtype")), flat)
    if options.get("attn_implementation") is not None:
        ours["attn_implementation"] = options["attn_implementation"]
    return ours


def generation_kwargs(value: Any, flat: dict[str, Any]) -> dict[str, Any]:
    ours = {name: name for name in ("temperature", "top_p", "top_k", "min_p")}
    ours |= dict.fromkeys(("max_new_tokens", "max_tokens"), "max_completion_length")
    options = _mapping(value, f"{' '.join(ours)} do_sample use_cache pad_token_id")
    if options.get("do_sample") is False:
        raise ValueError("do_sample: false would make all completions of a prompt equal: leave it out")
    return {key: options[name] for name, key in ours.items() if name in options}


def _mapping(value: Any, allowed: str) -> dict[str, Any]:
    if not isinstance(value, dict | None):
        raise ValueError(f"'{value}' is not a mapping: write {{setting: value}}")
    others = sorted(str(key) for key in set(value or {}) - set(allowed.split()))
    if others:
        raise ValueError(f"{', '.join(others)} inside it is not supported here: leave it out")
    return value or {}


def _adaptive_entropy(value: Any, flat: dict[str, Any]) -> dict[str, Any]:
    target = flat.get("entropy_target")  # here a target is what switches the adaptation on
    return {"entropy_target": (0.2 if target is None else target) if value else None}


def _importance_correction(value: Any, flat: dict[str, Any]) -> dict[str, Any]:
    if not value:
        return {"importance_correction": "none"}
    uses_vllm = flat.get("use_vllm") is True or flat.get("rollout_engine") == "vllm"
    return {"importance_correction": flat.get("importance_correction", "sequence_mask")} if uses_vllm else {}


def eval_strategy(value: Any, flat: dict[str, Any]) -> dict[str, Any]:
    """When the evaluation runs beside step 0 and the end."""
    if value in ("no", False, None):
        return {"fixed_eval_steps": 0} if "eval_steps" in flat else {}
    if value == "steps":
        return {} if "fixed_eval_steps" in flat else {"fixed_eval_steps": flat.get("logging_steps", 10)}
    if value != "epoch":
        raise ValueError(f"'{value}' is not known: write no, steps or epoch")
    epochs = float(flat.get("num_train_epochs", 1))
    by_epochs = flat.get("max_steps", -1) in (None, -1) and epochs > 1
    return {"fixed_eval_steps": 1 / epochs if by_epochs else 0}


def _ddp_timeout(value: Any, flat: dict[str, Any]) -> dict[str, Any]:
    """Public recipes write decades; a week is the most here."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return {"collective_timeout_s": min(value, MAX_SECONDS) if is_number else value}


CONVERTED: dict[str, Converter] = {
    "dtype": _dtype,
    "ddp_timeout": _ddp_timeout,
    "fp16": _fp16,
    "model_init_kwargs": _model_init_kwargs,
    "generation_kwargs": generation_kwargs,
    "sync_ref_model": lambda value, flat: {"kl_reference": "moving"} if value else {},
    "use_adaptive_entropy": _adaptive_entropy,
    "vllm_importance_sampling_correction": _importance_correction,
    "eval_strategy": eval_strategy,
    "warmup_steps": lambda value, flat: {
        "warmup_ratio" if isinstance(value, float) and 0 < value < 1 else "warmup_steps": value
    },
    "use_cpu": lambda value, flat: {"device": "cpu"} if value else {},
}

# Why nothing depends on these names -> the names.
_WHY_NOT: dict[str, str] = {
    "the final model alone is uploaded, at the end, with the token of `hf auth login` or HF_TOKEN": """
        hub_token hub_strategy hub_always_push hub_revision
        log_completions_hub_repo trackio_space_id trackio_bucket_id trackio_static_space_id""",
    "metrics.jsonl has every step, completions/ what was sampled": """
        log_completions log_multimodal num_completions_to_print log_unique_prompts logging_strategy
        logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica log_on_each_node
        disable_tqdm skip_memory_metrics debug""",
    "the evaluation runs before the first step and after the last, unless eval_num_samples is 0": """
        do_eval do_train do_predict eval_on_start eval_delay eval_do_concat_batches eval_use_gather_object
        eval_accumulation_steps prediction_loss_only include_for_metrics batch_eval_metrics
        bf16_full_eval fp16_full_eval""",
    "the best model is the one with the highest accuracy in the fixed evaluation": """
        metric_for_best_model greater_is_better""",
    "problems are made or read by the tasks, shuffled by their seed": """
        remove_unused_columns shuffle_dataset dataloader_drop_last dataloader_num_workers
        dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
        dataloader_multiprocessing_context dataloader_in_order label_names train_sampling_strategy
        length_column_name dataset_streaming ignore_data_skip""",
    "weights are sharded by FSDP2 over the ranks that a launcher starts": """
        fsdp fsdp_config deepspeed ds3_gather_for_generation accelerator_config local_rank
        ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend
        average_tokens_across_devices ignore_bias_buffers""",
    "update and sampling bring their own kernels, packing and precision": """
        gradient_checkpointing_kwargs torch_compile_backend torch_compile_mode use_liger_kernel
        liger_kernel_config use_cache torch_empty_cache_steps auto_find_batch_size tf32 pad_to_multiple_of
        cast_lm_head_to_fp32 disable_dropout cache_implementation use_transformers_continuous_batching
        transformers_continuous_batching_config use_transformers_paged""",
    "checkpoints are whole, written by the first rank": """
        save_only_model save_on_each_node enable_jit_checkpoint restore_callback_states_from_checkpoint""",
    "it belongs to a setting that is not here": """
        vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg bnb_4bit_quant_storage
        label_smoothing_factor""",
}
NO_EFFECT = by_name(_WHY_NOT)

# name -> (values that ask for nothing beside None, false, 0 and empty ones; why it is not supported)
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "trust_remote_code": ((), "code from a model's folder is never run"),
    "router_aux_loss_coef": ((), "there is no auxiliary loss for routers"),
    "repetition_penalty": ((1, 1.0), "the loss needs the probabilities that were sampled from"),
    "vllm_model_impl": (("vllm", "auto"), "vLLM's own models are used: give server_args what you need"),
    "vllm_structured_outputs_regex": ((), "completions are sampled freely"),
    "multi_objective_aggregation": (("sum_then_normalize",), "rewards are summed before they are normalized"),
    "optim_args": ((), "the optimizer is set by weight_decay and adam_*"),
    "optim_target_modules": ((), "all trained weights have one optimizer"),
    "neftune_noise_alpha": ((), "there is no noise on embeddings"),
    "parallelism_config": ((), "ranks are shared out by tp_size and ddp_size"),
    "model_revision": (("main",), "download that revision and give its folder as model_name_or_path"),
    "lora_target_parameters": ((), "adapters are for linear layers: use lora_target_modules"),
    "lora_modules_to_save": ((), "beside an adapter no other weights are trained"),
    "lora_task_type": (("CAUSAL_LM",), "only causal language models are trained"),
    "load_in_8bit": ((), "weights beneath an adapter have 16 bits or 4: set load_in_4bit=true use_peft=true"),
    "bnb_4bit_quant_type": (("nf4",), "4-bit weights are NF4"),
    "use_bnb_nested_quant": ((), "the scales of 4-bit weights are kept in float32"),
}
