"""Build a run of a configuration, train it by GRPOTrainer, write what runs of whetstone write."""

import contextlib
import logging
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback

from benchmarks.trl.callback import TrlCallback, TrlRun, evaluate
from benchmarks.trl.environments import check_environments, loop_arguments
from benchmarks.trl.keys import check_keys, trl_arguments
from benchmarks.trl.problems import Problems, Rewards
from whetstone.config import Config, LoadedConfig
from whetstone.engines.packages import check_packages
from whetstone.errors import UserError
from whetstone.evaluation.evaluator import Evaluator
from whetstone.export.push import push_final
from whetstone.model.chat import Chat
from whetstone.model.manifest import read_manifest
from whetstone.model.policy import load_policy
from whetstone.model.sharded import model_writer
from whetstone.report.results import write_results
from whetstone.run.checkpoint import Checkpoint, save_model
from whetstone.run.folder import how_to_resume, open_run
from whetstone.run.metrics import MetricsLog
from whetstone.run.preflight import preflight
from whetstone.run.record import record_session
from whetstone.run.resources import ResourceMonitor
from whetstone.run.setup import build_tasks_and_plan, make_collector, make_scorer, make_source
from whetstone.run.sft_start import start_from_sft
from whetstone.run.signals import StopRequest
from whetstone.run.status import StatusFile
from whetstone.run.viewer import Viewer, is_wanted
from whetstone.terminal.log import log_ending, setup_logging
from whetstone.terminal.stages import stage
from whetstone.train import train

logger = logging.getLogger("whetstone")


def train_with_trl(loaded: LoadedConfig) -> dict[str, Any]:
    """Run a configuration to its end or a requested stop; returns the content of train_results.json."""
    config = loaded.config
    check_keys(config)
    check_environments(config)
    check_packages(config)
    _require_trl()
    if config.update.sft_steps:
        loaded = start_from_sft(loaded, train)
        config = loaded.config
    with contextlib.ExitStack() as stack:
        folder, checkpoint, notes = open_run(config, stack)
        if checkpoint is not None:
            _check_resume(config, checkpoint)
        setup_logging(folder)
        stack.push(log_ending)
        stack.enter_context(StatusFile(folder))
        stack.enter_context(Viewer(folder, is_wanted=is_wanted(config.run.watch)))
        record_session(folder, resumed_from=None if checkpoint is None else checkpoint.step)
        for note in (*loaded.notes, *notes):
            logger.info(note)
        run = build(config, folder, checkpoint, stack)
        stop = stack.enter_context(StopRequest())
        before = 0.0 if checkpoint is None else read_manifest(checkpoint.folder).seconds
        started_at = time.monotonic() - before
        callback = TrlCallback(run, stop, started_at)
        trainer = make_trainer(run, callback)
        if checkpoint is None:
            evaluate(run, 0)
        with callback.progress, stage("training by TRL"):
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint.folder))
        step = trainer.state.global_step
        if step < run.plan.num_steps:
            logger.info(f"Stopped at step {step}, saved. {how_to_resume(config)}")
            raise KeyboardInterrupt
        return _finish(run, time.monotonic() - started_at)


def build(config: Config, folder: Path, checkpoint: Checkpoint | None, stack: contextlib.ExitStack) -> TrlRun:
    """Everything but TRL's trainer."""
    torch.manual_seed(config.run.seed)  # a new LoRA adapter begins with random numbers
    fixed, tasks, plan = build_tasks_and_plan(config)
    scorer = stack.enter_context(make_scorer(config))
    # Float32 weights, and bf16 by autocast: AdamW on bf16 weights would lose updates as small as these are.
    # Always the first weights: TRL takes its reference from them and then loads the checkpoint itself.
    with stage("loading the model"):
        policy = load_policy(config.model.model_copy(update={"bf16": False}))
    # Evaluations sample here, from the weights that TRL trains.
    native = config.rollout.model_copy(update={"rollout_engine": "native"})
    collector = make_collector(config.model_copy(update={"rollout": native}), policy, scorer, stack)
    if checkpoint is None:
        preflight(config, make_source(collector, tasks, config, plan), policy, folder)
    metrics = MetricsLog(folder, config, resume_step=None if checkpoint is None else checkpoint.step)
    stack.callback(metrics.close)
    problems = Problems(tasks, Chat(policy.tokenizer, config.model), config, policy.max_length)
    return TrlRun(
        config=config,
        plan=plan,
        folder=folder,
        policy=policy,
        attention=config.model.attn_implementation or policy.original_attention,
        rewards=Rewards(problems, scorer, policy.stop_token_ids, plan.num_generations),
        evaluator=Evaluator(config, fixed, collector, folder) if fixed else None,
        metrics=metrics,
        resources=stack.enter_context(ResourceMonitor(folder, policy.device)),
        checkpoint=checkpoint,
    )


def make_trainer(run: TrlRun, callback: "TrlCallback | None" = None) -> Any:
    """TRL's GRPOTrainer on our model, problems and rewards."""
    trl = _require_trl()
    policy, plan, problems = run.policy, run.plan, run.rewards.problems
    try:
        policy.set_attention(run.attention)  # ours is for packed sequences
        arguments = trl_arguments(run.config, plan, run.folder, policy.device)
        loop = loop_arguments(run.config, problems.problem)
        trainer = trl.GRPOTrainer(
            model=policy.model,
            reward_funcs=run.rewards.reward,
            args=trl.GRPOConfig(**arguments),
            train_dataset=problems.dataset(plan.num_batches * plan.prompts_per_batch),
            processing_class=problems.tokenizer(),
            callbacks=[] if callback is None else [callback],
            **loop,
        )
    except (ValueError, ImportError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"TRL rejects this ({reason}): change it, or use `whet train`.") from error
    if loop:
        run.rewards.watch(trainer)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _finish(run: TrlRun, seconds: float) -> dict[str, Any]:
    """The last evaluation, the final model without what TRL added to it, and what every run leaves."""
    evaluate(run, run.plan.num_steps)
    policy, step = run.policy, run.plan.num_steps
    if policy.is_lora and "ref" in policy.model.peft_config:  # TRL's reference where beta > 0
        policy.model.delete_adapter("ref")
    policy.set_attention(policy.original_attention)
    with stage("saving the model"):
        save_model(model_writer(policy), run.folder / "final_model", step)
    results = write_results(run.folder, steps=step, model_step=step, seconds=seconds)
    push_final(run.config, run.folder)
    return results


def _require_trl() -> Any:
    try:
        import trl
    except ImportError as error:
        if error.name != "trl":
            raise  # it is there, but something it needs is broken: its own message knows more
        raise UserError(
            "python -m benchmarks.trl needs TRL, which is not installed: run `pip install 'trl==1.16.*'`."
        ) from None
    if not trl.__version__.startswith("1.16."):
        raise UserError(
            f"This needs TRL 1.16, but {trl.__version__} is installed: run `pip install 'trl==1.16.*'`."
        )
    return trl


def _check_resume(config: Config, checkpoint: Checkpoint) -> None:
    if not (checkpoint.folder / "trainer_state.json").is_file():
        raise UserError(
            f"{checkpoint.folder} was not written by TRL, so TRL can't resume it: use `whet train`, or "
            "choose another run_name."
        )
    if config.loss.beta > 0 and config.loss.kl_reference == "moving":
        raise UserError(
            "kl_reference: moving can't be resumed, since TRL's checkpoints lack the reference: choose "
            "another run_name for a new run."
        )
