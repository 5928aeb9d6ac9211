"""Keys that are rejected, all in one message: unknown ones with a suggestion, refused ones with the reason.

A synonym is better than the nearest spelling, and no suggestion is better than a misleading one.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field

from whetstone.config.trl_names import by_name
from whetstone.config.yaml_text import shorten
from whetstone.errors import UserError

# our key -> what other trainers and papers call it, beyond what is accepted as another name
_SUGGESTIONS: dict[str, str] = {
    "data_path": "train_data train_path data_file dataset_file training_file file json_path",
    "eval_data_path": "test_file validation_file eval_file val_file test_path test_data eval_data",
    "dataset_name": "dataset data hub_dataset",
    "datasets": "task tasks",
    "environment": "env environments env_name",
    "developer_prompt": "system system_message instruction sys_prompt",
    "epsilon": "cliprange clip_eps clip_epsilon clip_ratio eps_clip clip_low clip_ratio_low",
    "epsilon_high": "clip_high clip_ratio_high cliprange_high eps_clip_high",
    "beta": "kl kl_beta kl_weight kl_penalty kl_loss_coef kl_coeff kl_coefficient init_kl_coeff init_kl_coef",
    "entropy_coef": "entropy_weight entropy_bonus entropy_coefficient ent_coef",
    "value_clip": "clip_range_vf cliprange_value vf_clip",
    "value_coef": "vf_coef vf_coeff",
    "num_generations": "group_size num_samples_per_prompt n_samples_per_prompt num_rollouts "
    "rollouts_per_prompt num_completions samples_per_prompt n_generations generations_per_prompt",
    "prompts_per_step": "train_batch_size rollout_batch_size global_batch_size num_prompts prompts_per_batch",
    "per_device_train_batch_size": "batch_size bs micro_batch_size per_device_batch_size device_batch_size "
    "per_gpu_train_batch_size ppo_micro_batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
    "gradient_accumulation_steps": "grad_accum grad_accumulation gradient_accumulation accumulation_steps "
    "grad_accum_steps",
    "max_completion_length": "max_tokens response_length max_response_length generation_length "
    "max_gen_length max_generated_tokens max_output_tokens completion_length max_completion_tokens",
    "max_prompt_length": "prompt_length max_prompt_tokens max_input_length",
    "server_max_model_length": "max_seq_length max_seq_len max_length context_length seq_len sequence_length",
    "num_train_epochs": "epochs n_epochs num_epoch train_epochs total_epochs max_epochs",
    "max_steps": "steps total_steps num_steps train_steps training_steps num_train_steps "
    "total_training_steps num_training_steps max_train_steps",
    "warmup_steps": "warmup num_warmup_steps lr_warmup_steps",
    "max_grad_norm": "grad_clip gradient_clipping clip_grad clip_grad_norm max_norm grad_norm_clip "
    "gradient_clip_val",
    "optim": "optimizer optimiser",
    "lr_scheduler_type": "scheduler lr_scheduler lr_schedule schedule",
    "bf16": "precision mixed_precision half",
    "reward_funcs": "rewards reward reward_functions reward_function reward_fn reward_fns reward_func",
    "advantage": "advantage_estimator adv_estimator baseline",
    "loss_type": "loss algorithm algo policy_loss",
    "rollout_engine": "engine backend inference_engine sampler",
    "auto_resume": "resume continue",
    "checkpoint_path": "checkpoint ckpt ckpt_path load_checkpoint",
    "resume_from_checkpoint": "resume_from resume_path",
    "fixed_eval_steps": "eval_every eval_interval eval_freq eval_frequency test_freq evaluate_every",
    "eval_num_samples": "num_eval_samples num_eval_problems eval_size eval_samples max_eval_samples",
    "save_steps": "save_every save_freq save_interval checkpoint_every checkpoint_steps save_frequency",
    "logging_steps": "log_every log_interval log_freq log_steps print_every",
    "tp_size": "tensor_parallel_size tensor_parallel tp",
    "ddp_size": "dp_size data_parallel_size",
    "seed": "random_seed manual_seed rng_seed",
    "run_name": "name exp_name experiment job_name",
    "report_to": "wandb logger tracker loggers log_to log_with tracking",
    "output_dir": "output out_dir save_dir log_dir save_path output_path ckpt_dir checkpoint_dir",
    "wandb_entity": "entity wandb_team",
    "use_peft": "peft adapter use_adapter",
    "lora_target_modules": "target_modules",
    "device": "cuda gpu use_gpu use_cuda",
    "model_name_or_path": "model_id base_model pretrained_model pretrained pretrain hf_model",
    "reward_timeout_s": "reward_timeout timeout",
    "reward_workers": "num_workers workers num_reward_workers",
    "cpu_offload": "offload offload_optimizer",
    "async_rollouts": "async async_rollout asynchronous",
    "micro_batch_tokens": "max_tokens_per_batch max_length_per_device token_budget",
}
SYNONYMS = by_name(_SUGGESTIONS)
_CUTOFF = 0.82  # of difflib: one or two letters off


@dataclass
class Complaints:
    """What can't be taken, gathered over all layers so that one message names everything."""

    known: frozenset[str]  # every name that is accepted
    unknown: list[tuple[str, str]] = field(default_factory=list)  # (key, origin)
    refused: list[tuple[str, str, str]] = field(default_factory=list)  # (key, origin, reason)

    def raise_all(self) -> None:
        sentences = []
        entries = []
        for key, origin in self.unknown:
            suggestion = suggest(key, self.known)
            hint = f", did you mean '{suggestion}'?" if suggestion else ""
            entries.append(f"'{shorten(key)}' ({origin}{hint})")
        if entries:
            noun = "is no key" if len(entries) == 1 else "are no keys"
            sentences.append(f"There {noun} {', '.join(entries)}. `whet config` lists them all.")
        sentences += [f"{key} ({origin}) is not supported: {reason}." for key, origin, reason in self.refused]
        if sentences:
            raise UserError(" ".join(sentences))


def suggest(key: str, known: Iterable[str]) -> str | None:
    """What was probably suggestion; None where a guess would mislead."""
    plain = key.lower().replace("-", "_").split(".")[-1]
    if plain in SYNONYMS:
        return SYNONYMS[plain]
    if len(plain) > 100:
        return None
    names = list(known)
    if plain in names:
        return plain
    close = difflib.get_close_matches(plain, [*names, *SYNONYMS], n=1, cutoff=_CUTOFF)
    return SYNONYMS.get(close[0], close[0]) if close else None
