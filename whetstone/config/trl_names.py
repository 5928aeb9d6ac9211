"""Every name of TRL 1.16's GRPOConfig, ModelConfig and ScriptArguments that is not simply a key of ours.

`tests/config/test_trl_names.py` fails if one has no decision. Others' names are in `aliases.py`.
"""

from collections.abc import Callable
from typing import Any

from whetstone.config.base import MAX_SECONDS
from whetstone.config.tables import table

Converter = Callable[[Any, dict[str, Any]], dict[str, Any]]  # (its value, all keys) -> our keys
RENAMED: dict[str, str] = table("trl_names")["names"]
NO_EFFECT: dict[str, str] = table("trl_names")["without"]  # why nothing depends on a name
# name -> (values that ask for nothing beside None, false, 0 and empty ones; why it is not supported)
REFUSED: dict[str, tuple[list[Any], str]] = table("trl_names")["refused"]


def switch(key: str) -> Converter:
    """A name that `Translation` handles once it knows the other keys."""

    def convert(value: Any, flat: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(value, bool | None):
            raise ValueError(f"'{value}' is not true or false")
        return {key: value}

    return convert


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
    "use_vllm": switch("use_vllm"),
    "use_cpu": lambda value, flat: {"device": "cpu"} if value else {},
}
ONLY_TRL = {*RENAMED, *CONVERTED, *NO_EFFECT, *REFUSED, "dataset_name"}
ONLY_TRL -= {"warmup_steps", "use_vllm", "logging_first_step"}  # also in files of ours
