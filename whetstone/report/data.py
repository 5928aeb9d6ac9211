"""What report.html holds of a run: the documents that the page of `whet watch` reads, within a bound."""

import itertools
import json
from typing import Any

from whetstone.report.read import Evaluation, Run
from whetstone.watch import runs
from whetstone.watch.tokens import tokens as read_tokens

MAX_ROWS = 1000  # of metrics
MAX_TEXT = 4000  # characters of a completion
MAX_BYTES = 1_500_000  # of each: completions of the last step, their tokens, an evaluation
MAX_EVALUATIONS = 20  # at which a problem is shown
KEYS = ("problem", "task", "messages", "sample", "completion", "answer", "gold", "reward", "parts", "failure")
KEYS += ("outcome", "tests", "extra", "length", "finish", "correct", "turns", "turn_rewards", "turn_seconds")
KEYS += ("environment_s", "environment_error", "tool_calls", "tool_errors")


def page_data(run: Run) -> dict[str, Any]:
    """For report.js: the run, its metrics as columns, and documents by kind and step."""
    documents: dict[str, Any] = {}
    for evaluation in run.ends:
        documents[f"tasks/{evaluation.step}"] = _tasks(evaluation)
        first = [_row(row) for row in evaluation.completions if row.get("sample", 0) == 0]
        documents[f"evaluations/{evaluation.step}"] = {"completions": _within(first)}
    histories = [{"problem": problem, "entries": entries} for problem, entries in _histories(run).items()]
    documents |= {f"problems/{history['problem']}": history for history in _within(histories)}
    step = max(runs.steps(run.folder / "completions", "step_", ".jsonl"), default=None)
    changes: dict[str, Any] = {
        "columns": _columns(run),
        "evaluations": [evaluation.step for evaluation in run.ends],
    }
    if step is not None:
        tokens = _tokens(run, step)
        first = {part["row"]["problem"] for part in tokens["parts"]} if tokens else set()
        documents[f"completions/{step}"] = _completions(run, step, first)
        changes["completions"] = [step]
        if tokens:
            documents[f"tokens/{step}"] = tokens
            changes["tokens"] = [step]
    return {"run": {"name": run.name}, "changes": changes, "documents": documents}


def _columns(run: Run) -> dict[str, list[Any]]:
    """Metrics of training and evaluation, name -> values by row; of a long run evenly chosen rows."""
    size = -(-len(run.rows) // MAX_ROWS) or 1
    minutes = itertools.accumulate((row.get("step_time") or 0.0) / 60 for row in run.rows)
    timed = [{**row, "minutes": time} for row, time in zip(run.rows, minutes, strict=True)]
    chosen = [row for n, row in enumerate(timed) if n % size == 0 or n == len(timed) - 1]
    rows = [*chosen, *map(_evaluation_row, run.evaluations)]
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: [_short(row.get(key)) for row in rows] for key in keys}


def _evaluation_row(evaluation: Evaluation) -> dict[str, Any]:
    """An evaluation as metrics.jsonl has it."""
    row: dict[str, Any] = {"step": evaluation.step, "kind": "eval"}
    for key in ("accuracy", "reward") if evaluation.is_judged else ("reward",):
        share = evaluation.summary.get(key)
        share = share if isinstance(share, dict) else {}
        row |= {key: share.get("mean"), f"{key}_low": share.get("low"), f"{key}_high": share.get("high")}
    greedy = evaluation.summary.get("greedy_accuracy")
    return row | ({"greedy_accuracy": greedy.get("mean")} if isinstance(greedy, dict) else {})


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _tasks(evaluation: Evaluation) -> dict[str, Any]:
    return evaluation.summary.get("per_task", {}) if evaluation.is_judged else {}


def _row(row: dict[str, Any]) -> dict[str, Any]:
    result = {key: row[key] for key in KEYS if row.get(key) is not None}
    if "completion" in result:
        result["completion"] = _cut(result["completion"])
    if turns := result.pop("turns", []):
        messages = [message for message in turns if isinstance(message, dict)]
        result["turns"] = [{**message, "content": _cut(message.get("content", ""))} for message in messages]
    return result


def _cut(text: Any) -> str:
    text, rest = str(text)[:MAX_TEXT], len(str(text)) - MAX_TEXT
    return text if rest <= 0 else f"{text} ... ({rest:,} more characters)"


def _within(rows: list[dict[str, Any]], limit: int = MAX_BYTES) -> list[dict[str, Any]]:
    """Rows from the first on, as long as they fit."""
    fitting, size = [], 0
    for row in rows:
        size += len(json.dumps(row))
        if size > limit:
            break
        fitting.append(row)
    return fitting


def _completions(run: Run, step: int, first: set[str]) -> list[dict[str, Any]]:
    rows = [_row(row) for row in runs.completions(run.folder, step)]
    rows.sort(key=lambda row: row.get("problem") not in first)  # those with tokens come first
    return _within(rows)


def _tokens(run: Run, step: int) -> dict[str, Any] | None:
    document = read_tokens(run.folder, step)
    if document is None:
        return None
    parts = [
        {**part, "row": {key: part["row"][key] for key in ("problem", "sample")}}
        for part in document["parts"]
    ]
    parts = _within(parts)
    used = {str(token) for part in parts for token in part["ids"]}
    texts = {token: text for token, text in document["texts"].items() if token in used}
    return {**document, "parts": parts, "texts": texts}


def _histories(run: Run) -> dict[str, list[dict[str, Any]]]:
    """The problems of the last evaluation at each evaluation."""
    histories: dict[str, list[dict[str, Any]]] = {}
    size = -(-len(run.evaluations) // MAX_EVALUATIONS) or 1
    for evaluation in [*run.evaluations[:-1:size], *run.evaluations[-1:]]:
        groups: dict[str, list[dict[str, Any]]] = {}
        for row in evaluation.completions:
            groups.setdefault(str(row.get("problem")), []).append(row)
        for problem, rows in groups.items():
            entry = runs.problem_entry("evaluation", evaluation.step, rows)
            if entry is not None:
                histories.setdefault(problem, []).append({key: _short(value) for key, value in entry.items()})
    return histories if len(run.evaluations) > 1 else {}
