"""`whet eval`: evaluate `checkpoint_path`, or the model itself, without training.

The results lie beside the checkpoint: RUN/evaluations/NAME for RUN/NAME. Where that may not be written, or
for weights that belong to no run, they lie in the configured run folder.
"""

import contextlib
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

from whetstone.config import Config, LoadedConfig
from whetstone.errors import UserError
from whetstone.evaluation.display import print_result
from whetstone.evaluation.evaluator import Evaluator
from whetstone.model.loading import verify_folder
from whetstone.model.sharded import load_sharded
from whetstone.parallel.collectives import run_on_main
from whetstone.run.folder import run_dir, scratch_folder
from whetstone.run.lock import RunLock
from whetstone.run.record import began_at, record_session
from whetstone.run.setup import describe_model, init_distributed, make_collector, make_scorer, prompt_filter
from whetstone.tasks.mixture import eval_problems
from whetstone.terminal.log import log_ending, setup_logging
from whetstone.terminal.stages import stage

ELSEWHERE = "wait until it ends, or write elsewhere with run_name=NAME"
logger = logging.getLogger("whetstone")


def evaluate_only(loaded: LoadedConfig) -> dict[str, Any]:
    """Evaluate on the fixed problems; returns the summary of the result."""
    config = loaded.config
    if config.evaluation.eval_num_samples == 0:
        raise UserError("There is nothing to evaluate: set eval_num_samples to how many problems you want.")
    weights = config.evaluation.checkpoint_path
    if weights is not None and not Path(weights).is_dir():
        raise UserError(f"checkpoint_path: '{weights}' is no folder: give a checkpoint-N or final_model.")
    if weights is not None:
        verify_folder(Path(weights))
    with contextlib.ExitStack() as stack:
        ranks = init_distributed(config, stack)
        folder = run_on_main(ranks, lambda: evaluation_folder(config, stack))
        folder = folder or stack.enter_context(scratch_folder())
        setup_logging(folder, is_main=ranks.is_main, name="evaluation.log")
        stack.push(log_ending)
        record_session(folder, num_ranks=ranks.world_size)
        for note in loaded.notes:
            logger.info(note)
        problems = eval_problems(config, prompt_filter(config))
        scorer = stack.enter_context(make_scorer(config, ranks))
        with stage("loading the model"):
            policy = load_sharded(config.model, config.parallel, ranks, weights)
            logger.info(describe_model(policy, config))
            now = run_on_main(ranks, lambda: began_at(Path(weights).parent) if weights else None, to_all=True)
            collector = make_collector(config, policy, scorer, stack, now)
            collector.engine.update_weights(0)
        evaluator = Evaluator(config, problems, collector, folder)
        step = None if weights is None else step_of(Path(weights))
        result = evaluator.run(step or 0, greedy=config.evaluation.eval_greedy)
        num_examples = config.evaluation.eval_num_examples_to_print
        print_result(result, title=title_of(config), num_examples=num_examples)
        logger.info(f"Every completion and score is in {folder / 'eval_results'}.")
    return result.summary()


def evaluation_folder(config: Config, stack: contextlib.ExitStack) -> Path:
    """The folder of an evaluation, made and locked until `stack` closes. Several may be in one run."""
    weights = config.evaluation.checkpoint_path
    name = "model" if weights is None else Path(os.path.abspath(weights)).name
    runs = [run_dir(config)]
    if weights is not None and (Path(weights).parent / "config.yaml").is_file():
        runs.insert(0, Path(weights).parent)
    failure = None
    for run in runs:
        folder = run / "evaluations" / name
        try:
            with contextlib.ExitStack() as locks:
                locks.enter_context(RunLock(run, shared=True, remedy=ELSEWHERE))
                locks.enter_context(RunLock(folder, remedy=ELSEWHERE))
                stack.push(locks.pop_all())
            return folder
        except UserError as error:
            failure = error
    assert failure is not None
    raise failure


def title_of(config: Config) -> str:
    """`Evaluation of outputs/quickstart/final_model (step 30)`"""
    weights = config.evaluation.checkpoint_path
    if weights is None:
        return f"Evaluation of {config.model.model_name_or_path}"
    step = step_of(Path(weights))
    return f"Evaluation of {weights}" + ("" if step is None else f" (step {step})")


def step_of(weights: Path) -> int | None:
    """The optimizer step that a checkpoint-N or final_model folder was saved at; None where nobody knows."""
    named = re.fullmatch(r"checkpoint-(\d+)", weights.name)
    if named:
        return int(named[1])
    try:
        results = json.loads((weights.parent / "train_results.json").read_text(encoding="utf-8"))
        steps = results["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return steps if weights.name == "final_model" and isinstance(steps, int) else None
