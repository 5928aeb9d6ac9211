"""Names from other trainers, and what they are taken for here; keys of data sets are in `data_keys.py`."""

from typing import Any

from whetstone.config import trl_names
from whetstone.config.tables import table
from whetstone.config.trl_names import Converter, eval_strategy

_TABLE = table("others")
# other name -> our key
RENAMED: dict[str, str] = trl_names.RENAMED | _TABLE["names"]


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
    "batch_counts_as_step": trl_names.switch("batch_counts_as_step"),
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

VALUES: dict[str, dict[str, list[str]]] = _TABLE["values"]  # our key -> their value -> ours, and a remark
REWARDS: dict[str, str] = _TABLE["rewards"]  # those of TRL's own script and of the course -> ours
WITHOUT_EFFECT: dict[str, str] = trl_names.NO_EFFECT | _TABLE["without"]  # why nothing depends on a name
REFUSED: dict[str, tuple[list[Any], str]] = trl_names.REFUSED | _TABLE["refused"]
# section of a nested file -> its short names -> ours, or one of the above; other keys are read as they are
SECTIONS: dict[str, dict[str, str]] = _TABLE["sections"]
