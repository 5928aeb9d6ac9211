"""Supervised steps before RL (`sft_steps`): a run of its own, whose model the RL run starts from."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from whetstone.config import Config, LoadedConfig, build, flatten
from whetstone.config.update import UpdateConfig
from whetstone.errors import UserError
from whetstone.parallel import mesh
from whetstone.run.folder import ensure_unused, run_dir
from whetstone.run.lock import RunLock

# Keys of RL that supervised training refuses or that would act on it.
_WITHOUT_RL = {
    "loss_type": "sft",
    "advantage": "group",
    "beta": 0.0,
    "target_kl": None,
    "entropy_coef": 0.0,
    "entropy_target": None,
    "importance_correction": "none",
    "off_policy_mask_threshold": None,
    "async_rollouts": 0,
    "dynamic_sampling": False,
    "top_entropy_quantile": 1.0,
    "mask_truncated_completions": False,
    "num_iterations": 1,
    "steps_per_generation": None,
    "generation_batch_size": None,
    "warmup_steps": 0,  # of max_steps; warmup_ratio is a share of whatever steps there are
}
_DONE = {"sft_steps": 0, "sft_learning_rate": UpdateConfig().sft_learning_rate}  # not without effect: used


def start_from_sft(loaded: LoadedConfig, train: Callable[[LoadedConfig], Any]) -> LoadedConfig:
    """Run the supervised steps; returns the configuration of the RL run, which starts from their model."""
    config = loaded.config
    if mesh.is_launched():
        raise UserError(
            "sft_steps needs a single process: run `whet sft`, then `whet train` with sft_steps=0 and "
            "model_name_or_path=outputs/sft/final_model."
        )
    supervised = sft_config(config)
    folder = run_dir(supervised)
    resumes = config.run.auto_resume or config.run.resume_from_checkpoint
    if not (resumes and (folder / "train_results.json").is_file()):
        with RunLock(run_dir(config)):  # nobody else may begin the run that these steps are for
            if not resumes:
                ensure_unused(config)
            train(replace(loaded, config=supervised))
    start = {"model_name_or_path": str(folder / "final_model"), **_DONE}
    return replace(loaded, config=build({**flatten(config), **start}))


def sft_config(config: Config) -> Config:
    """The same model, tasks and evaluation, with the loss of `whet sft`."""
    update, run = config.update, config.run
    name = {"run_name": f"{run.run_name}_sft"} if run.run_name else {"output_dir": f"{run.output_dir}_sft"}
    flat = {**flatten(config), **_WITHOUT_RL, **name}
    flat |= {"max_steps": update.sft_steps, "learning_rate": update.sft_learning_rate, **_DONE}
    flat["datasets"] = {task: {**spec, "curriculum": None} for task, spec in flat["datasets"].items()}
    if run.resume_from_checkpoint is not None:
        flat |= {"resume_from_checkpoint": None, "auto_resume": True}
    return build(flat)
