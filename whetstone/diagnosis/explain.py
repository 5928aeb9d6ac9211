"""`whet explain RUN`: why the loss is 0, the reward is flat, the run collapsed, and the setting to change."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import rich
from rich.padding import Padding
from rich.text import Text

from whetstone.diagnosis.checks import CHECKS, CONSEQUENCES, SOLVED, is_solved
from whetstone.diagnosis.checks_algorithm import ALGORITHM_CHECKS
from whetstone.diagnosis.history import Diagnosis, RunHistory, Severity, percent
from whetstone.errors import UserError
from whetstone.run.metrics import read_rows
from whetstone.run.record import check_run_folder, read_mapping
from whetstone.terminal.text import escape_controls

STYLES = {Severity.GRAVE: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold green"}


def diagnose(
    rows: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
) -> list[Diagnosis]:
    """Every verdict on a run, the gravest first; at least one.

    `rows` and `evals` are the training and the evaluation rows of metrics.jsonl, `config` the flat keys. An
    evaluation may hold `no_answer_ratio`, the fraction of its completions in which no answer was found.
    """
    history = RunHistory(rows, evals, config)
    verdicts = [v for check in (*CHECKS, *ALGORITHM_CHECKS) if (v := check(history)) is not None]
    fall = history.fall()
    if fall is not None and fall.is_collapse and not history.is_supervised:
        before = RunHistory([row for row in rows if row["step"] < fall.fell_step], evals, config)
        later = [v for check in CONSEQUENCES if (v := check(history)) is not None and check(before) is None]
        remedy = "This came with the collapse: mend that first."
        verdicts = [
            replace(v, title=f"{v.title}, since the collapse", remedy=remedy, severity=Severity.NOTE)
            if v in later
            else v
            for v in verdicts
        ]
    if is_solved(history) or all(verdict.severity is Severity.NOTE for verdict in verdicts):
        verdicts = [_outcome(history), *verdicts]  # the first of the notes
    return sorted(verdicts, key=lambda verdict: verdict.severity)  # stable: checks stand in order of weight


def _outcome(history: RunHistory) -> Diagnosis:
    """What came of a run in which nothing is wrong."""
    where = "the evaluation problems" if len(history.evals) > 1 else "its training problems"
    gain = "" if history.gain is None else f", {history.shown_gain(history.gain)} since the start"
    share = history.reward_variance
    learns = "" if share is None else f" {percent(share)} of the recent prompts had differing rewards."
    if is_solved(history):
        learns += f" Recent accuracy in training {percent(history.recent('accuracy'))}."
    step = max(row["step"] for row in (*history.rows, *history.evals))
    score = f"{history.measure.capitalize()} on {where} is {history.shown(history.score)}"
    evidence = f"{score}{gain}, at step {step}.{learns}"
    title, remedy = _title_and_remedy(history)
    return Diagnosis(title=title, evidence=evidence, remedy=remedy, severity=Severity.NOTE)


def _title_and_remedy(history: RunHistory) -> tuple[str, str]:
    if is_solved(history) and history.score < SOLVED - 0.1:
        return (
            "The training problems are solved, those of the evaluation are not",
            "Hardly a gradient is left in training: make datasets harder, or more like eval_datasets.",
        )
    if is_solved(history):
        return (
            "It learned to solve these problems" if history.rose else "These problems are solved",
            "Nothing to change. Nearly all answers are right, so there is hardly a gradient left: stop here, "
            "or make the problems harder (the settings under datasets, or a curriculum).",
        )
    if history.rose:
        return "Healthy: it learns", "Nothing to change; more steps may bring more."
    if history.in_warmup:
        return (
            "Too early to tell: the learning rate is still in its warm-up",
            f"It was at most {max(history.column('learning_rate')):.2g}, below learning_rate: raise "
            "max_steps, or lower warmup_steps or warmup_ratio.",
        )
    return (
        "Nothing is wrong, but no gain beyond chance yet",
        "Give it more steps (max_steps) or more prompts a step; a larger eval_num_samples would show "
        "a smaller gain. If it stays flat, raise learning_rate two or three times.",
    )


def load_history(run: str | Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """What `diagnose` takes, from the folder of a run, finished or not."""
    folder = Path(run)
    check_run_folder(folder)
    rows = read_rows(folder / "metrics.jsonl")
    training = [row for row in rows if row["kind"] == "train"]
    if not training:
        raise UserError(
            f"{folder} holds no training step in metrics.jsonl: give the folder of a run that has done at "
            "least one step; training.log says what happened before."
        )
    training[-1] = training[-1] | {"failures": _newest_failures(folder, training)}
    evals = [row | _of_completions(folder, row["step"]) for row in rows if row["kind"] == "eval"]
    return training, evals, read_mapping(folder / "config.yaml") or {}


def _of_completions(folder: Path, step: int) -> dict[str, float]:
    """What only the completions of an evaluation tell; nothing where the file is missing or broken."""
    document = read_mapping(folder / "eval_results" / f"eval_step_{step}.json") or {}
    try:
        unread = [completion["answer"] is None for completion in document["completions"]]
    except (KeyError, TypeError):
        return {}
    return {"no_answer_ratio": sum(unread) / len(unread)} if unread else {}


def _newest_failures(folder: Path, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Kind -> the reason in the newest written completions of a step that has such a failure."""
    reasons: dict[str, str] = {}
    kinds = {"environment": ("episodes/failed_ratio", "environment_error")}
    kinds["scoring"] = ("scoring_failures", "failure")
    for kind, (metric, field) in kinds.items():
        steps = [row["step"] for row in rows if row.get(metric)]
        files = (folder / "completions" / f"step_{step}.jsonl" for step in reversed(steps))
        with contextlib.suppress(StopIteration, OSError, ValueError, KeyError, TypeError, RecursionError):
            file = next(file for file in files if file.is_file())
            with file.open(encoding="utf-8", errors="replace") as lines:
                line = next(line for line in lines if f'"{field}": "' in line)
            reasons[kind] = escape_controls(json.loads(line)[field])
    return reasons


def explain(run: str | Path) -> list[Diagnosis]:
    """Read a run, print what there is to say about it, and return it."""
    verdicts = diagnose(*load_history(run))
    console = rich.get_console()
    for number, verdict in enumerate(verdicts, start=1):
        console.print(Text.assemble(f"{number}. ", (verdict.title, STYLES[verdict.severity])))
        body = Text.assemble(verdict.evidence, "\n", ("What to do  ", "bold"), verdict.remedy)
        console.print(Padding(body, (0, 0, 1, 3)), highlight=False)
    return verdicts
