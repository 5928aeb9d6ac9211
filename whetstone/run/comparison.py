"""The folder of `whet compare`: its cells, their results, and means over seeds with Student's t intervals.

The seeds of a variant are independent runs, so an interval over them tells what another seed would give.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from whetstone.evaluation.statistics import paired, sign_test, t_quantile, t_two_sided
from whetstone.run.record import read_mapping

GRID = "grid.json"  # what is compared


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of the grid."""

    name: str  # of its run folder and its log
    variant: str
    seed: int
    settings: list[str]  # the `key=value` settings of its run


def cell_results(folder: Path) -> dict[str, Any] | None:
    """train_results.json of a run; None where it has not ended."""
    path = folder / "train_results.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def over_seeds(values: Sequence[float], lowest: float = 0.0, highest: float = 1.0) -> dict[str, float | None]:
    """Mean and 95 % t-interval of independent runs, within what is possible; of one run only the mean."""
    mean = fmean(values)
    if len(values) < 2:
        return {"mean": mean, "low": None, "high": None}
    half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "low": max(lowest, mean - half), "high": min(highest, mean + half)}


def make_results(
    source: str, cells: Sequence[Cell], ended: Mapping[str, dict[str, Any] | None], failed: Mapping[str, str]
) -> dict[str, Any]:
    """results.json: every variant that has a finished run, in the order of the grid."""
    variants = []
    for name in dict.fromkeys(cell.variant for cell in cells):
        members = [cell for cell in cells if cell.variant == name]
        runs = [
            {"seed": cell.seed, "run": cell.name, **results}
            for cell in members
            if (results := ended.get(cell.name)) is not None
        ]
        if runs:
            settings = list(members[0].settings)
            variants.append({"name": name, "settings": settings, **_summary(runs), "seeds": runs})
    missing = [cell.name for cell in cells if ended.get(cell.name) is None]
    return {
        "config": source,
        "num_runs": len(cells),
        "variants": variants,
        "failed": dict(failed),
        "missing": [name for name in missing if name not in failed],
    }


def _summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    keys = ("accuracy_before", "accuracy_after", "greedy_before", "greedy_after")
    means = {key: [run[key]["mean"] for run in runs if run[key] is not None] for key in keys}
    before = means["accuracy_before"]
    gains = [b - a for a, b in zip(before, means["accuracy_after"], strict=True)]
    return {
        "num_seeds": len(runs),
        **{key: over_seeds(values) if values else None for key, values in means.items()},
        "gain": over_seeds(gains, -fmean(before), 1 - fmean(before)),
        "seconds": fmean(run["seconds"] for run in runs),
    }


# How variants differ from the first. Pairs are runs of the same seed; with one shared seed they are the
# evaluation's problems, whose interval tells nothing of other seeds.


def versus_first(
    variants: Sequence[Mapping[str, Any]], folders: Mapping[str, Path]
) -> list[dict[str, Any] | None]:
    """For each variant its difference from the first; None for the first and where nothing is shared."""
    first = variants[0]
    return [None, *(_versus(first, variant, folders) for variant in variants[1:])]


def _versus(
    first: Mapping[str, Any], other: Mapping[str, Any], folders: Mapping[str, Path]
) -> dict[str, Any] | None:
    ours = {run["seed"]: run for run in first["seeds"]}
    theirs = {run["seed"]: run for run in other["seeds"]}
    shared = [seed for seed in ours if seed in theirs]
    if len(shared) >= 2:
        ends = [[runs[seed]["accuracy_after"]["mean"] for seed in shared] for runs in (ours, theirs)]
        changes = [after - before for before, after in zip(*ends, strict=True)]
        return {"from": first["name"], "over": "seeds", "num_pairs": len(shared), **over_pairs(changes)}
    if not shared:
        return None
    pair = [runs[shared[0]] for runs in (ours, theirs)]
    tables = [answers_at(folders[run["run"]], run.get("model_step", -1)) for run in pair]
    problems = [problem for problem in tables[0] if problem in tables[1]]
    if not problems or len(problems) < max(len(table) for table in tables):
        return None  # other problems: nothing to pair
    change = paired(*([table[problem] for problem in problems] for table in tables))
    return {
        "from": first["name"], "over": "problems", "num_pairs": len(problems), "mean": change.difference,
        "low": change.low, "high": change.high, "p_value": change.p_value,
    }  # fmt: skip


def over_pairs(changes: Sequence[float]) -> dict[str, float | None]:
    """Mean of independent differences of shares, its 95 % t-interval within -1 to 1, and the p-value of 0."""
    error = stdev(changes) / math.sqrt(len(changes))
    if error < 1e-12:  # all alike: Student's t has no scale, so only their signs count
        p_value = sign_test(sum(c > 0 for c in changes), sum(c < 0 for c in changes))
        return {"mean": fmean(changes), "low": None, "high": None, "p_value": p_value}
    return {**over_seeds(changes, -1.0), "p_value": t_two_sided(fmean(changes) / error, len(changes) - 1)}


def answers_at(run: Path, step: int) -> dict[str, list[bool]]:
    """Problem -> which samples were right in a run's evaluation at `step`; empty where it can't be read."""
    document = read_mapping(run / "eval_results" / f"eval_step_{step}.json")
    answers: dict[str, list[bool]] = {}
    try:
        for completion in (document or {})["completions"]:
            answers.setdefault(completion["problem"], []).append(bool(completion["correct"]))
    except (KeyError, TypeError):
        return {}
    return answers


def read_cells(folder: Path) -> tuple[str, list[Cell]] | None:
    """(configuration, cells) of a comparison's folder; None where there is none, or its file is broken."""
    document = read_mapping(folder / GRID)
    try:
        return (
            None if document is None else (document["source"], [Cell(**cell) for cell in document["cells"]])
        )
    except (KeyError, TypeError):
        return None


def run_path(folder: Path, cell: Cell) -> Path:
    return folder / "runs" / cell.name
