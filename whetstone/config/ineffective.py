"""Keys that do nothing in a run as it is configured: one table, and one line that names them.

A row is (whether its keys do nothing, the keys, why or what to change). Leaving out all keys of the rows that
hold changes no number of the run. Of several rows that name a key the first is reported. To add a key, add a
row, and a case to tests/config/test_ineffective.py.
"""

from typing import Any

from whetstone.config.engine_traits import SERVER_ENGINES, engine_traits
from whetstone.config.load import build, flatten
from whetstone.config.losses import LOSSES
from whetstone.config.plan import Plan
from whetstone.config.sections import Config
from whetstone.errors import UserError

Row = tuple[bool, str, str]
_EPISODES = ("environment", "repair", "guess_number", "wordle", "maze_walk")  # tasks of several turns


def ineffective_settings(config: Config, plan: Plan, *, on_cpu: bool = False) -> list[str]:
    """One line that names all keys without effect; empty where there are none."""
    keys: dict[str, list[str]] = {}
    for key, reason in without_effect(config, plan, on_cpu=on_cpu).items():
        keys.setdefault(reason, []).append(key)
    parts = [f"{', '.join(names)} ({reason})" for reason, names in keys.items()]
    return [f"No effect here: {'; '.join(parts)}."] if parts else []


def without_effect(config: Config, plan: Plan, *, on_cpu: bool = False) -> dict[str, str]:
    """Each key that differs from its default and does nothing -> why, or what to change.

    `on_cpu`: whether the run is on a CPU, where `device` leaves that open.
    """
    flat, reasons = flatten(config), {}
    on_cpu = on_cpu or config.model.device == "cpu"
    rows = [*_model(config, on_cpu), *_tasks(config), *_run(config, plan), *_loss(config, plan)]
    for holds, keys, reason in rows:
        for key in keys.split() if holds else ():
            if key not in reasons and _differs(flat, key):
                reasons[key] = reason
    return reasons


def _differs(flat: dict[str, Any], key: str) -> bool:
    """Whether a key has another value than if nobody set it: some defaults depend on other keys."""
    try:
        return flat[key] != flatten(build({name: flat[name] for name in flat if name != key}))[key]
    except UserError:  # refused without it
        return True


def _model(c: Config, on_cpu: bool) -> list[Row]:
    model, engine, split = c.model, c.rollout.rollout_engine, c.parallel.tp_size > 1
    traits = engine_traits(engine)
    own_attention = f"rollout_engine={engine} and the update bring their own attention"
    return [
        (not model.use_peft, "lora_r lora_alpha lora_dropout lora_target_modules use_rslora use_dora",
         "all weights are trained: for an adapter set use_peft=true"),
        (model.lora_r == 1, "use_rslora", "the square root of lora_r=1 is 1"),
        (not model.apply_chat_template, "chat_template chat_template_kwargs", "set apply_chat_template=true"),
        (model.apply_chat_template, "prompt_template", "set apply_chat_template=false"),
        (not traits.uses_attn_implementation, "attn_implementation", own_attention),
        (model.torch_compile is True and split, "torch_compile", "layers split by tp_size can't be compiled"),
        (not split, "sequence_parallel", "tp_size is 1"),
        (on_cpu, "bf16 bf16_rounding cpu_offload", "a CPU trains in float32, in its own memory"),
        (not model.bf16, "bf16_rounding", "set bf16=true"),
        (engine != "vllm", "vllm_mode", "set rollout_engine=vllm"),
        (not traits.has_servers,
         "rollout_servers server_base_url server_host server_port server_timeout_s server_request_timeout_s "
         "server_gpu_memory_utilization server_tensor_parallel_size server_max_model_length server_devices "
         "server_enable_sleep_mode server_group_port server_python server_args weight_transfer "
         "weight_transfer_dir",
         f"set rollout_engine={' or '.join(SERVER_ENGINES)}"),
        (c.engines.server_host is None, "server_port", "set server_host too"),
    ]  # fmt: skip


def _tasks(c: Config) -> list[Row]:
    tasks, own, evaluation = c.tasks, c.environments, c.evaluation
    names = [*tasks.datasets, *tasks.eval_datasets]

    def has(*kinds: str) -> bool:
        """Whether a task is, or may be, of these kinds: the user's own may, and what is not named yet."""
        return not names or any(":" in name or name.split("/")[0] in kinds for name in names)

    rows = [spec.config for spec in tasks.datasets.values() if {"path", "dataset"} & set(spec.config)]
    limited = any(row.get("max_samples") == tasks.dataset_size for row in rows)
    scored, code = "accuracy" in tasks.reward_funcs, has("code", "repair")
    episodes = bool(own.tools or own.agent or own.rollout_func) or has(*_EPISODES)
    return [
        (bool(rows) and not limited, "dataset_size", "rows are read: set max_samples"),
        (not (tasks.developer_prompt or "").strip(), "developer_role", "set developer_prompt"),
        ("length" not in tasks.reward_funcs, "overlong_buffer_length", "add length to reward_funcs"),
        (not has("math", "rows"), "reward_correct reward_wrong reward_no_answer", "for tasks math and rows"),
        (not code, "use_reasoning_format base_reward_weight perfect_reward_weight test_reward "
         "max_tests_per_problem sandbox_output_kb", "for tasks code and repair"),
        (not scored, "reward_correct reward_wrong reward_no_answer base_reward_weight perfect_reward_weight "
         "test_reward", "add accuracy to reward_funcs"),
        (not has("code"), "sandbox_pool ray_address", "for the task code"),
        (c.programs.sandbox_pool != "ray", "ray_address", "set sandbox_pool=ray"),
        (not code and "python" not in own.tools, "sandbox_time_limit_s sandbox_memory_mb", "no program runs"),
        (not own.tools, "tool_call_format", "set tools"),
        (own.agent is None, "agent_max_length", "set agent"),
        (not episodes, "max_turns max_tool_calling_iterations max_observation_length environment_timeout_s "
         "environment_memory_mb turn_credit turn_discount full_determinism",
         "no task has several turns: set tools, agent or an environment"),
        (own.turn_credit != "turn", "turn_discount", "set turn_credit=turn"),
        (evaluation.eval_num_samples == 0, "eval_datasets eval_dataset_seed fixed_eval_steps "
         "eval_temperature eval_samples_per_problem eval_greedy eval_num_examples_to_print "
         "per_device_eval_batch_size", "eval_num_samples is 0"),
        (evaluation.eval_temperature == 0, "eval_samples_per_problem eval_greedy", "eval_temperature is 0"),
    ]  # fmt: skip


def _run(c: Config, p: Plan) -> list[Row]:
    run, update, rollout, sinks = c.run, c.update, c.rollout, set(c.run.report_to)
    by_prompts, schedule = rollout.prompts_per_step is not None, update.lr_scheduler_type
    one_part = rollout.steps_per_generation is None
    return [
        (by_prompts, "per_device_train_batch_size", "prompts_per_step decides: set it to null"),
        (by_prompts and one_part, "gradient_accumulation_steps", "prompts_per_step decides: set it to null"),
        (c.loss.advantage not in ("group", "rloo"), "dynamic_sampling dynamic_sampling_max_rounds",
         f"with advantage={c.loss.advantage}, equal rewards have a gradient too"),
        (rollout.max_prompt_length is None, "filter_overlong_prompts", "set max_prompt_length"),
        (not rollout.dynamic_sampling, "dynamic_sampling_max_rounds", "set dynamic_sampling=true"),
        (p.num_batches == 1 and c.loss.importance_correction == "none", "async_rollouts",
         "the run has one batch"),
        (update.max_steps > 0, "num_train_epochs", "max_steps decides: set it to -1"),
        (update.sft_steps == 0, "sft_learning_rate", "set sft_steps"),
        (schedule == "constant", "warmup_ratio warmup_steps", "set lr_scheduler_type=constant_with_warmup"),
        (schedule.startswith("constant"), "lr_scheduler_kwargs", f"{schedule} has no settings"),
        (update.warmup_steps > 0, "warmup_ratio", "warmup_steps decides"),
        (not c.can_skip_zero_advantages, "skip_zero_advantages", "no completion could be left out"),
        (p.eval_every == 0, "load_best_model_at_end", "set fixed_eval_steps"),
        (not sinks & {"wandb", "trackio"}, "wandb_project wandb_name", "set report_to=wandb"),
        ("wandb" not in sinks, "wandb_entity wandb_tags", "set report_to=wandb"),
        (run.log_tokens_groups == 0, "log_tokens_mb", "log_tokens_groups is 0"),
        (run.save_strategy != "steps", "save_steps", f"save_strategy is {run.save_strategy}"),
        (run.save_strategy == "no", "save_total_limit", "save_strategy is no"),
        (not run.push_to_hub, "hub_model_id hub_private_repo", "set push_to_hub=true"),
    ]  # fmt: skip


def _loss(c: Config, p: Plan) -> list[Row]:
    loss, name, gae = c.loss, c.loss.loss_type, c.loss.advantage == "gae"
    known = name in LOSSES  # a loss of the user's own may read any key
    function, fixed_ratio = (LOSSES[name].function, LOSSES[name].ratio is not None) if known else ("", False)
    unread = {"clipped_surrogate": "", "cispo": "epsilon delta", "": ""}.get(
        function, "epsilon epsilon_high delta"
    )
    moving, in_reward = loss.kl_reference == "moving", loss.beta > 0 and loss.kl_in == "reward"
    to_sampler = loss.beta > 0 and loss.kl_reference == "rollout"
    dropout = c.model.use_peft and c.model.lora_dropout > 0
    once = p.updates_per_batch == 1
    more = "each batch has one update: set num_iterations or steps_per_generation higher"
    # The first ratio to the old logprobs is 1: exactly, or nearly where these have a pass of their own.
    margin = loss.upper_epsilon - 1 if function == "cispo" else min(loss.epsilon, loss.upper_epsilon)
    is_one = known and once and (not (to_sampler or in_reward) or (margin >= 1e-3 and not dropout))
    kl_has_ratio = loss.beta > 0 and not in_reward and loss.kl_estimator != "full"
    detached = function in ("reinforce", "negative_log_likelihood") or (function == "cispo" and is_one)
    detached = detached and not (kl_has_ratio and loss.use_bias_correction_kl)
    no_kl = once and not dropout and loss.kl_estimator in ("k2", "k3")
    imitates = loss.is_supervised and not c.rollout.rejection_sampling
    return [
        (bool(unread), unread, f"{name} has no such bound"),
        (is_one, "epsilon epsilon_high delta", more),
        (fixed_ratio or detached, "importance_sampling_level", f"{name} decides"),
        (known and name != "sapo", "sapo_temperature_pos sapo_temperature_neg", "set loss_type=sapo"),
        (loss.beta == 0, "kl_reference kl_estimator kl_in use_bias_correction_kl ref_model_sync_steps "
         "ref_model_mixup_alpha", "beta is 0"),
        (to_sampler and no_kl, "beta target_kl kl_reference kl_estimator use_bias_correction_kl",
         f"the KL to the policy that sampled is 0 while {more}"),
        (not kl_has_ratio, "use_bias_correction_kl", "for estimates of the KL in the loss"),
        (not moving, "ref_model_sync_steps ref_model_mixup_alpha", "set kl_reference=moving"),
        (p.num_steps <= loss.ref_model_sync_steps and moving,
         "kl_reference ref_model_sync_steps ref_model_mixup_alpha",
         f"the reference never moves in {p.num_steps} steps: lower ref_model_sync_steps"),
        (loss.entropy_target is None, "entropy_coef_max",
         "set entropy_target"),
        (once and c.rollout.async_rollouts == 0 and not c.rollout.is_truncated,
         "off_policy_mask_threshold", more),
        (loss.importance_correction == "none", "importance_correction_min importance_correction_max",
         "set importance_correction"),
        (loss.is_supervised, "advantage scale_rewards turn_credit turn_discount", f"not for {name}"),
        (imitates, "num_generations", "solutions are imitated: set rejection_sampling=true"),
        (loss.advantage == "reinforce_pp" or (gae and loss.scale_rewards == "batch"), "scale_rewards",
         f"advantage={loss.advantage} is in units of the batch's spread"),
        (gae, "turn_discount", "set gamma, the discount of advantage=gae"),
        (not gae, "critic critic_learning_rate critic_warmup_steps gamma gae_lambda value_clip value_coef",
         "set advantage=gae"),
        (c.critic.critic == "model", "value_coef", "the critic shares no layers with the policy"),
        (once and not dropout, "value_clip", more),
    ]  # fmt: skip
