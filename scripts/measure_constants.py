"""Measures the best constant answer of every task of reasoning-gym, and writes what it found.

    python scripts/measure_constants.py             all tasks (about half an hour on two cores)
    python scripts/measure_constants.py gcd maze    these tasks; the others keep their rows
    python scripts/measure_constants.py --docs      docs/tasks.md again, from the table

The candidates are the gold answers of the task's own problems and the corpus of the tests. Writes
whetstone/tasks/gym_constants.json, which `whet tasks NAME` reads, and docs/tasks.md.
"""

import json
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.corpora.answers import JUNK  # noqa: E402
from whetstone.config import TaskSpec, build  # noqa: E402
from whetstone.tasks import constants  # noqa: E402
from whetstone.tasks.gym import GymTask, describe, known_names  # noqa: E402
from whetstone.tasks.gym_gold import gold_answer  # noqa: E402
from whetstone.types import Problem  # noqa: E402

NUM_PROBLEMS = 200
NUM_FIRST = 40  # a candidate that is right on none of these is dropped
MOST_SECONDS = 60.0  # for the candidates of one task; the commonest gold answers come first
FEWEST = 0.02  # below this share a task has so many answers that no constant is worth naming
TABLE = ROOT / "whetstone" / "tasks" / constants.TABLE
DOCS = ROOT / "docs" / "tasks.md"

HEAD = """# Tasks of reasoning-gym

Reference: every task of reasoning-gym, and what a constant answer earns on it. `scripts/measure_constants.py`
writes this page.

`whet train datasets='{gcd: {}}'` trains on a task by its name. `whet tasks NAME` shows its problems, settings
and levels.

The **best constant answer** is the answer that is right on most problems, without reading the question. The
candidates are the gold answers of other problems and a corpus of junk. Compare an accuracy with it: on a task
with two answers, 70 % may mean nothing. It was measured on training problems with default settings
(reasoning-gym {gym}, {problems} problems a task; fewer where a problem takes seconds). A dash: no constant
is right on {fewest} % of the problems.

- Scorers of reasoning-gym that pay wrong answers or junk are repaired (`whetstone/tasks/gym_repairs.py`);
  [lab/scorers.md](lab/scorers.md) lists what they paid.
- An answer without the form that its task asks for earns nothing (`whetstone/tasks/gym_forms.py`).
- An answer longer than 1,000 characters plus four times the gold answer earns nothing (boxnet: more, by the
  number of boxes).
- Part credit can still pay a constant: in time_intervals `01:32` earns 0.18 in the mean although it is right
  on 0.5 %, since durations are paid by closeness. With the task countdown `base_reward` (0.1) is paid for any
  arithmetic, a single number included.
- In propositional_logic a conclusion must need at least two premises. Problems with contradictory premises
  are left out. So are jugs that cannot be filled as asked.

| Task | Category | What it is | Best constant answer | Right on |
|---|---|---|---|---|
"""


def make(task: str) -> GymTask:
    return GymTask(build({"datasets": {task: {}}}), task, TaskSpec(weight=1.0), "train")


def measure(task: str, num_problems: int = NUM_PROBLEMS) -> dict[str, Any]:
    """The row of one task."""
    one = make(task)
    began = time.monotonic()
    problems: list[Problem] = []
    while len(problems) < num_problems and time.monotonic() - began < 10 * MOST_SECONDS:
        problems.append(one.problem(len(problems)))
    golds = [gold_answer(task, problem.answer) for problem in problems]
    began = time.monotonic()
    answer, right = "", 0
    for candidate in candidates(golds):
        count = sum(is_right(one, problem, candidate) for problem in problems[:NUM_FIRST])
        if count:
            count += sum(is_right(one, problem, candidate) for problem in problems[NUM_FIRST:])
        if count > right:
            answer, right = candidate, count
        if time.monotonic() - began > MOST_SECONDS:
            break
    rate = round(right / len(problems), 4)
    return {
        "answer": answer if rate >= FEWEST and right > 1 else None,  # once: on its own problem
        "rate": rate,
        "problems": len(problems),
    }


def candidates(golds: list[str]) -> list[str]:
    """Gold answers that occur twice, then the corpus, then the other gold answers."""
    common = [gold for gold, count in Counter(golds).most_common() if count > 1]
    return list(dict.fromkeys([*common, *JUNK, *golds]))


def is_right(task: GymTask, problem: Problem, answer: str) -> bool:
    return task.score(problem, f"<answer>{answer}</answer>").parts["correct"] == 1.0


def docs_row(task: str, row: dict[str, Any]) -> str:
    category, what = describe(task)
    shown, rate = "-", "-"
    if row["answer"] is not None:
        text = constants.shorten(row["answer"].replace("\n", " / "), 40).replace("|", "\\|").replace("`", "'")
        shown, rate = f"`{text or ' '}`", f"{row['rate']:.0%}".replace("%", " %")
    what = " ".join(what.split()).replace("|", "\\|")
    return f"| {task} | {category} | {what} | {shown} | {rate} |"


def write_docs(table: dict[str, Any]) -> None:
    head = HEAD.replace("{gym}", table["reasoning_gym"]).replace("{problems}", str(table["problems"]))
    head = head.replace("{fewest}", f"{100 * FEWEST:g}")
    rows = [docs_row(task, row) for task, row in table["tasks"].items()]
    DOCS.write_text(head + "\n".join(rows) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> None:
    table = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {"tasks": {}}
    table = {"reasoning_gym": version("reasoning-gym"), "problems": NUM_PROBLEMS, "tasks": table["tasks"]}
    names = [] if arguments == ["--docs"] else arguments or known_names()
    for task in names:
        table["tasks"][task] = measure(task)
        print(task, table["tasks"][task], flush=True)
        table["tasks"] = dict(sorted(table["tasks"].items()))
        TABLE.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    write_docs(table)


if __name__ == "__main__":
    main(sys.argv[1:])
