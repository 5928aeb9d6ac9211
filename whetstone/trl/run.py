"""A run under TRL from end to end: build the parts, hand them to GRPOTrainer, write what our runs write.

The only file that imports TRL, inside functions.
"""

import contextlib
import logging
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback

from whetstone.config import Config, LoadedConfig
from whetstone.errors import UserError
from whetstone.evaluation.evaluator import Evaluator
from whetstone.model.chat import Chat
from whetstone.model.policy import load_policy
from whetstone.model.sharded import model_writer
from whetstone.report.results import write_results
from whetstone.run.checkpoint import Checkpoint, save_model
from whetstone.run.folder import open_run
from whetstone.run.record import record_session
from whetstone.run.setup import make_collector, make_scorer, open_metrics, plan_problems
from whetstone.run.signals import StopRequest
from whetstone.terminal.log import log_ending, setup_logging
from whetstone.terminal.stages import stage
from whetstone.trl.keys import check_keys, trl_arguments
from whetstone.trl.problems import Problems, Rewards
from whetstone.trl.watcher import Parts, TrlCallback, evaluate

logger = logging.getLogger("whetstone")


def train_with_trl(loaded: LoadedConfig) -> dict[str, Any]:
    """Run a configuration to its end, or to a stop that was asked for; returns what train_results.json
    holds.
    """
    config = loaded.config
    check_keys(config)
    _require_trl()
    folder, found, notes = open_run(config)
    if found is not None:
        _check_resume(config, found)
    setup_logging(folder)
    with contextlib.ExitStack() as stack:
        stack.push(log_ending)
        record_session(folder, resumed_from=None if found is None else found.step)
        for note in (*loaded.notes, *notes):
            logger.info(note)
        parts = build(config, folder, found, stack)
        stop = stack.enter_context(StopRequest())
        before = 0.0 if found is None else found.seconds
        begun = time.monotonic() - before
        watcher = TrlCallback(parts, stop, begun)
        trainer = make_trainer(parts, watcher)
        if found is None:
            evaluate(parts, 0)
        with watcher.progress, stage("training by TRL"):
            trainer.train(resume_from_checkpoint=None if found is None else str(found.folder))
        step = trainer.state.global_step
        if step < parts.plan.num_steps:
            logger.info(f"Stopped at step {step}, saved. Go on with the same command and auto_resume=true.")
            raise KeyboardInterrupt
        return _finish(parts, time.monotonic() - begun)


def build(config: Config, folder: Path, found: Checkpoint | None, stack: contextlib.ExitStack) -> Parts:
    """Every part but TRL's trainer, as `train.build` makes them."""
    torch.manual_seed(config.run.seed)  # a new LoRA adapter begins with random numbers
    fixed, tasks, plan = plan_problems(config)
    scorer = stack.enter_context(make_scorer(config))
    # Float32 weights, and bf16 by autocast: AdamW on bf16 weights would lose updates as small as these are.
    # Always the first weights: TRL takes its reference from them and then loads the checkpoint itself.
    with stage("loading the model"):
        policy = load_policy(config.model.model_copy(update={"bf16": False}))
    collector = make_collector(config, policy, scorer, stack)
    metrics = open_metrics(config, folder, found, stack)
    problems = Problems(tasks, Chat(policy.tokenizer, config.model), config, policy.max_length)
    return Parts(
        config=config,
        plan=plan,
        folder=folder,
        policy=policy,
        attention=config.model.attn_implementation or policy.own_attention,
        rewards=Rewards(problems, scorer, policy.stop_token_ids, plan.num_generations),
        evaluator=Evaluator(config, fixed, collector, folder) if fixed else None,
        metrics=metrics,
        found=found,
    )


def make_trainer(parts: Parts, watcher: "TrlCallback | None" = None) -> Any:
    """TRL's GRPOTrainer on our model, problems and rewards."""
    trl = _require_trl()
    policy, plan, problems = parts.policy, parts.plan, parts.rewards.problems
    try:
        policy.set_attention(parts.attention)  # ours is for packed sequences
        arguments = trl_arguments(parts.config, plan, parts.folder, policy.device)
        trainer = trl.GRPOTrainer(
            model=policy.model,
            reward_funcs=parts.rewards.reward,
            args=trl.GRPOConfig(**arguments),
            train_dataset=problems.dataset(plan.num_batches * plan.prompts_per_batch),
            processing_class=problems.tokenizer(),
            callbacks=[] if watcher is None else [watcher],
        )
    except (ValueError, ImportError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(
            f"TRL refuses this configuration ({reason}): change it, or set trainer=whetstone."
        ) from error
    trainer.remove_callback(PrinterCallback)
    return trainer


def _finish(parts: Parts, seconds: float) -> dict[str, Any]:
    """The last evaluation, the final model without what TRL added to it, and what every run leaves."""
    after = evaluate(parts, parts.plan.num_steps)
    policy = parts.policy
    if policy.is_lora and "ref" in policy.model.peft_config:  # TRL's reference where beta > 0
        policy.model.delete_adapter("ref")
    policy.set_attention(policy.own_attention)
    with stage("saving the model"):
        save_model(model_writer(policy), parts.folder / "final_model", parts.plan.num_steps)
    return write_results(parts.folder, after, steps=parts.plan.num_steps, seconds=seconds)


def _require_trl() -> Any:
    try:
        import trl
    except ImportError as error:
        if error.name != "trl":
            raise  # it is there, but something it needs is broken: its own message knows more
        raise UserError(
            "trainer: trl needs TRL, which is not installed: run `pip install 'whetstone[trl]'` or `pip "
            "install 'trl==1.16.*'`, or set trainer=whetstone."
        ) from None
    if not trl.__version__.startswith("1.16."):
        raise UserError(
            f"trainer: trl is written for TRL 1.16, but {trl.__version__} is installed: run `pip install "
            "'trl==1.16.*'`, or set trainer=whetstone."
        )
    return trl


def _check_resume(config: Config, found: Checkpoint) -> None:
    if not (found.folder / "trainer_state.json").is_file():
        raise UserError(
            f"{found.folder} was not written by TRL, so TRL can't go on from it: set trainer=whetstone, or "
            "choose another run_name."
        )
    if config.loss.beta > 0 and config.loss.kl_reference == "moving":
        raise UserError(
            "kl_reference: moving can't be resumed with trainer: trl, since TRL's checkpoints lack the "
            "reference: begin anew under another run_name, or set trainer=whetstone."
        )
