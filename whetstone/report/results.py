"""The end of a run: train_results.json, the model card, the report, and a summary for the terminal."""

import contextlib
import json
import logging
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whetstone.diagnosis.explain import diagnose, load_history
from whetstone.errors import message_of
from whetstone.evaluation.display import format_accuracy, format_mean
from whetstone.evaluation.evaluator import read_summary
from whetstone.evaluation.statistics import Accuracy
from whetstone.files import atomic_write
from whetstone.model.card import ADAPTER_CONFIG
from whetstone.report import write_report
from whetstone.report.card import write_card
from whetstone.run.metrics import read_rows
from whetstone.terminal.environment import program
from whetstone.terminal.log import STEP_LINES
from whetstone.terminal.stages import stage
from whetstone.terminal.text import counted

logger = logging.getLogger("whetstone")
LAST = ("loss", "reward", "accuracy", "grad_norm", "learning_rate", "entropy", "kl", "num_tokens")


def write_results(folder: Path, *, steps: int, model_step: int, seconds: float) -> dict[str, Any]:
    """Write train_results.json and the report of a run whose final model, that of `model_step`, is saved, and
    say where they are. Only a missing train_results.json is an error: what describes it is not worth a push.
    """
    results: dict[str, Any] = {"steps": steps, "model_step": model_step, "seconds": round(seconds, 1)}
    rows = [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "train"]
    results["last_step"] = {key: row[key] for row in rows[-1:] for key in LAST if key in row}
    before, after = (
        read_summary(folder / "eval_results" / f"eval_step_{step}.json") for step in (0, model_step)
    )
    if before is not None and after is not None:
        results |= {
            "accuracy_before": before["accuracy"],
            "accuracy_after": after["accuracy"],
            "greedy_before": before["greedy_accuracy"],
            "greedy_after": after["greedy_accuracy"],
            "eval_temperature": after["temperature"],
            "reward_before": before.get("reward"),
            "reward_after": after["reward"],
            "is_judged": after["is_judged"],
            "delta_vs_step0": after["delta_vs_step0"],
        }
    atomic_write(folder / "train_results.json", json.dumps(results, indent=1))
    with _failing_alone("The model card"):
        write_card(folder / "final_model", folder, step=model_step)
    report = None
    with _failing_alone("The report"), stage("writing the report"):
        report = write_report(folder)
    _print_summary(folder, results, report)
    return results


@contextlib.contextmanager
def _failing_alone(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a full disk, damaged files, a bug: the run itself has succeeded
        logger.warning(f"{what} failed ({message_of(error)}); the model and train_results.json are saved.")
        logging.getLogger(STEP_LINES).warning("Where it failed:", exc_info=True)


def _print_summary(folder: Path, results: dict[str, Any], report: Path | None) -> None:
    """Before and after, and where everything is."""
    if "accuracy_after" in results:
        problems, temperature = results["accuracy_after"]["num_problems"], results["eval_temperature"]
        logger.info(f"On {counted(problems, 'problem')} it never trained on, with 95 % intervals:")
        for when in ("before", "after"):
            sampled, greedy = Accuracy(**results[f"accuracy_{when}"]), results[f"greedy_{when}"]
            if not results["is_judged"]:
                reward = format_mean(Accuracy(**results[f"reward_{when}"]))
                logger.info(f"  {when:7s} reward {reward} at temperature {temperature:g}")
                continue
            line = f"  {when:7s} {format_accuracy(sampled)} at temperature {temperature:g}"
            logger.info(line + (f", greedy {format_accuracy(Accuracy(**greedy))}" if greedy else ""))
    logger.info(f"{counted(results['steps'], 'step')} in {results['seconds']:.0f} s.")
    logger.info(f"The model is in {folder / 'final_model'}.")
    if results["model_step"] != results["steps"]:
        logger.info(
            f"It is that of step {results['model_step']}, which had the best evaluation "
            "(load_best_model_at_end). The problems that chose it also measured it: expect a little less on "
            "others."
        )
    if (folder / "final_model" / ADAPTER_CONFIG).is_file():
        logger.info("It is a LoRA adapter: README.md beside it says how to load it, merge it and serve it.")
    if report is not None:
        logger.info(f"The report is {report}: open it in a browser.")
    with _failing_alone("The diagnosis"):
        for verdict in diagnose(*load_history(folder))[:1] if results["last_step"] else []:
            logger.info(f"Diagnosis: {verdict.title}. {verdict.remedy}")
    logger.info("Next:")
    run, model = shlex.quote(str(folder)), shlex.quote(str(folder / "final_model"))
    for arguments in (f"chat {run}", f"explain {run}", f"eval checkpoint_path={model}", f"export {run}"):
        logger.info(f"  {program()} {arguments}")
