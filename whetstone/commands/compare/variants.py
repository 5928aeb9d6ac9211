"""How the variants of a comparison differ from the first one: a paired difference, its interval, its p-value.

Pairs are runs of the same seed. With one shared seed they are problems: no word on other seeds.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from whetstone.evaluation.statistics import paired, sign_test, t_quantile, t_two_sided

Answers = dict[str, list[bool]]  # problem -> which of its samples were right


def last_answers(run: Path) -> Answers:
    """The last evaluation of a run; empty where there is none that can be read."""
    files = {
        int(match[1]): path
        for path in (run / "eval_results").glob("eval_step_*.json")
        if (match := re.fullmatch(r"eval_step_(\d+)", path.stem))
    }
    answers: Answers = {}
    try:
        document = json.loads(files[max(files)].read_text(encoding="utf-8")) if files else {"completions": []}
        for completion in document["completions"]:
            answers.setdefault(completion["problem"], []).append(bool(completion["correct"]))
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return answers


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
    tables = [last_answers(folders[runs[shared[0]]["run"]]) for runs in (ours, theirs)]
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
    mean, degrees = fmean(changes), len(changes) - 1
    error = stdev(changes) / math.sqrt(len(changes))
    if error < 1e-12:  # all alike: Student's t has no scale, so only their signs count
        p_value = sign_test(sum(c > 0 for c in changes), sum(c < 0 for c in changes))
        return {"mean": mean, "low": None, "high": None, "p_value": p_value}
    half = t_quantile(degrees) * error
    return {
        "mean": mean, "low": max(-1.0, mean - half), "high": min(1.0, mean + half),
        "p_value": t_two_sided(mean / error, degrees),
    }  # fmt: skip
