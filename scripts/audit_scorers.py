"""Probes every scorer of reasoning-gym, as it is and as repaired here, and writes docs/lab/scorers.md.

    python scripts/audit_scorers.py                 all tasks (about 20 minutes on two cores)
    python scripts/audit_scorers.py gcd maze        prints the findings on these tasks

Both are scored in the isolated processes of `whet check --rewards`. The page lists every probe that
reasoning-gym's own scorer pays and should not, with what this package pays for it.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from whetstone.config import Config, TaskSpec, build  # noqa: E402
from whetstone.rewards.answers import extract_tag  # noqa: E402
from whetstone.tasks.check_rewards import TaskCheck, check_rewards  # noqa: E402
from whetstone.tasks.gym import EVALUATED, GymTask, known_names  # noqa: E402
from whetstone.terminal.findings import Status  # noqa: E402
from whetstone.types import Problem, TaskScore  # noqa: E402

NUM_PROBLEMS = 20
NUM_RAW, NUM_EVALUATED = 10, 3  # a scorer that evaluates the text may hang, and takes its limit each time
SMALLER = {"knight_swap": {"max_nodes": 6, "max_attempts": 5}, "futoshiki": {"max_board_size": 5}}
EVALUATES = EVALUATED | {"countdown", "puzzle24"}
AT_ONCE = 5  # tasks of a configuration: a worker that was ended warms up all of them again
DOCS = ROOT / "docs" / "lab" / "scorers.md"


class Raw(GymTask):
    """A task of reasoning-gym on the same problems, paid by its own scorer."""

    def __init__(self, config: Config, name: str, spec: TaskSpec, split: str, shared: bool = False) -> None:
        super().__init__(config, name.rpartition("/")[2], spec, split, shared)
        self.name = name

    def score(self, problem: Problem, text: str) -> TaskScore:
        answer = extract_tag(text)
        value = 0.0 if answer is None else float(self._dataset.score_answer(answer, problem.answer))
        return TaskScore(correct=value >= 1.0, reward=value if math.isfinite(value) else 0.0, answer=answer)


def audit(names: list[str], *, raw: bool) -> dict[str, TaskCheck]:
    """The probes of these tasks, by reasoning-gym's scorers or by ours."""
    prefix = f"{Path(__file__).resolve()}:Raw/" if raw else "reasoning_gym/"
    checks: dict[str, TaskCheck] = {}
    names = sorted(names, key=lambda name: (name in EVALUATES, name))
    for first in range(0, len(names), AT_ONCE):
        some = names[first : first + AT_ONCE]
        datasets = {prefix + name: {"config": SMALLER.get(name, {})} for name in some}
        flat: dict[str, Any] = {"datasets": datasets, "reward_workers": 1, "eval_num_samples": 0}
        config = build({**flat, "reward_timeout_s": 1.0 if raw else 10.0})
        number = NUM_EVALUATED if EVALUATES & set(some) else NUM_RAW
        for check in check_rewards(config, number if raw else NUM_PROBLEMS):
            name = check.task.removeprefix(prefix)
            checks[name] = check
            for finding in check.findings:
                if finding.status is not Status.OK:
                    scorer = "theirs" if raw else "ours"
                    print(f"{scorer:<6} {finding.status:<8} {name}: {finding.text}", flush=True)
    return checks


def rows(before: dict[str, TaskCheck], now: dict[str, TaskCheck]) -> list[dict[str, Any]]:
    """The probes that look wrong before or now; those of a task that are paid the same share a row."""
    table: dict[tuple[str, str, str], list[str]] = {}
    for name in sorted(before):
        ours = {result.name: result for result in now[name].results}
        theirs = {result.name: result for result in before[name].results}
        for probe in dict.fromkeys([*theirs, *ours]):
            old, new = theirs.get(probe), ours.get(probe)
            if any(result is not None and result.status is not Status.OK for result in (old, new)):
                table.setdefault((name, cell(old), cell(new)), []).append(probe)
    return [
        {"task": name, "probe": ", ".join(probes), "before": old, "now": new}
        for (name, old, new), probes in table.items()
    ]


def cell(result: Any) -> str:
    """`paid on 5 of 5`, `part credit 0.31`, `fails on 5 of 5`, `0`."""
    if result is None:
        return "-"
    if result.failures:
        return f"scoring fails on {result.failures} of {result.number}"
    if result.paid:
        return f"paid on {result.paid} of {result.number}"
    return f"{result.accuracy:.2f}" if result.accuracy else "0"


def write_page(table: list[dict[str, Any]]) -> None:
    """docs/lab/scorers.md: the text above the table stays, the rows are new."""
    mark = "| task | probe | paid before | paid now |\n|---|---|---|---|\n"
    head, _, _ = DOCS.read_text(encoding="utf-8").partition(mark)
    lines = [f"| {row['task']} | {row['probe']} | {row['before']} | {row['now']} |" for row in table]
    DOCS.write_text(head + mark + "\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    names = sys.argv[1:] or known_names()
    table = rows(audit(names, raw=True), audit(names, raw=False))
    if sys.argv[1:]:
        print(json.dumps(table, indent=1, ensure_ascii=False))
    else:
        write_page(table)


if __name__ == "__main__":
    main()
