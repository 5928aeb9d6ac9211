"""The files of a run folder as plain data. Whatever a partial run does not have yet is empty or None here."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whetstone.errors import UserError
from whetstone.run.metrics import read_rows
from whetstone.run.record import check_run_folder, read_mapping, read_sessions


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One eval_step_N.json."""

    step: int
    summary: dict[str, Any]
    completions: list[dict[str, Any]]

    @property
    def is_judged(self) -> bool:
        """Whether answers are right or wrong; rows without answers have a reward only."""
        return self.summary.get("is_judged", True)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything the report is made of."""

    folder: Path
    config: dict[str, Any]
    rows: list[dict[str, Any]]  # of training, by step
    evaluations: list[Evaluation]  # by step
    results: dict[str, Any] | None  # train_results.json: there once the run has ended
    session: dict[str, Any] | None = None  # the first of run.json: version, machine, command, date

    @property
    def name(self) -> str:
        return str(self.config.get("run_name") or self.folder.resolve().name)

    @property
    def first(self) -> Evaluation | None:
        """The evaluation that others are compared with."""
        return self.evaluations[0] if self.evaluations else None

    @property
    def last(self) -> Evaluation | None:
        """That of the final model, or the newest, where there is more than one."""
        final = (self.results or {}).get("model_step")
        of_final = [evaluation for evaluation in self.evaluations[1:] if evaluation.step == final]
        return (of_final or self.evaluations[1:] or [None])[-1]

    @property
    def ends(self) -> list[Evaluation]:
        """The first and the last evaluation, as far as there are any."""
        return [evaluation for evaluation in (self.first, self.last) if evaluation is not None]

    @property
    def num_steps(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def seconds(self) -> float | None:
        if self.results is not None and self.results.get("seconds") is not None:
            return float(self.results["seconds"])
        times = self.column("step_time")[1]
        return sum(times) if times else None

    def column(self, key: str) -> tuple[list[int], list[float]]:
        """(steps, values) of a metric, where it is a number."""
        pairs = [(row["step"], row[key]) for row in self.rows if row.get(key) is not None]
        return [step for step, _ in pairs], [float(value) for _, value in pairs]

    def recent(self, key: str) -> float | None:
        """Mean of a metric over the last fifth of the run."""
        _, values = self.column(key)
        tail = values[-max(1, len(values) // 5) :]
        return sum(tail) / len(tail) if tail else None


def read_run(folder: Path) -> Run:
    """Read a run folder, or say why there is nothing to report."""
    check_run_folder(folder)
    rows = [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "train"]
    evaluations = _evaluations(folder / "eval_results")
    if not rows and not evaluations:
        raise UserError(
            f"{folder} holds neither rows in metrics.jsonl nor eval_results: give the folder of a run that "
            "has done at least one step or evaluation."
        )
    return Run(
        folder=folder,
        config=read_mapping(folder / "config.yaml") or {},
        rows=sorted(rows, key=lambda row: row["step"]),
        evaluations=evaluations,
        results=read_mapping(folder / "train_results.json"),
        session=next(iter(read_sessions(folder)), None),
    )


def _evaluations(folder: Path) -> list[Evaluation]:
    paths = [path for path in folder.glob("*.json") if re.fullmatch(r"eval_step_[0-9]+", path.stem)]
    evaluations = [
        Evaluation(step=document["step"], summary=document["summary"], completions=document["completions"])
        for document in map(read_mapping, paths)
        if document is not None and _is_whole(document)
    ]
    return sorted(evaluations, key=lambda evaluation: evaluation.step)


def _is_whole(document: dict[str, Any]) -> bool:
    """Whether an evaluation's file has the parts that it was written with."""
    step, summary, completions = (document.get(key) for key in ("step", "summary", "completions"))
    if type(step) is not int or not isinstance(summary, dict) or not isinstance(completions, list):
        return False
    return isinstance(summary.get("accuracy"), dict) and all(isinstance(row, dict) for row in completions)
