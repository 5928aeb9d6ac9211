"""docs/results.md has the tables of the kept runs."""

import importlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
results_page = importlib.import_module("results_page")
learning = importlib.import_module("learning")


def test_the_page_has_the_tables_of_the_kept_runs() -> None:
    page = results_page.PAGE.read_text(encoding="utf-8")
    for name, rows in results_page.SECTIONS.items():
        table = page.split(f"<!-- {name} -->\n", 1)[1].split("\n<!-- end -->")[0]
        assert table == results_page.table(rows), "python benchmarks/results_page.py"


def test_the_runs_beside_trl_are_those_that_were_kept() -> None:
    page = results_page.PAGE.read_text(encoding="utf-8")
    for name in ("Whetstone, 60 steps, seed 44", "TRL + vLLM"):
        last = learning.kept_runs(learning.RESULTS / "gsm8k")[name]["eval"][-1]
        for accuracy in ("accuracy", "greedy_accuracy"):
            assert results_page.accuracy([last], accuracy) in page


def run(before: float, after: float, minutes: float, **bounds: float) -> dict[str, Any]:
    points = [{"step": 0, "accuracy": before, "greedy_accuracy": 0.5}]
    points += [{"step": 8, "accuracy": after, "greedy_accuracy": 0.25, **bounds}]
    return {"train": [[1, 0.5, 0.1], [8, minutes, 0.2]], "eval": points}


def test_rows_by_hand() -> None:
    row = results_page.Row("a", "b", "c", ())
    interval = {"accuracy_low": 0.61, "accuracy_high": 0.89}
    assert results_page.cells(row, [run(0.1, 0.75, 1.26, **interval)]) == [
        "[a](recipes/b.md)", "8", "1.3", "10.0 %", "75.0 % [61.0, 89.0]", "50.0 %", "25.0 %",
    ]  # fmt: skip
    seeds = [run(0.1, 0.75, 1.0), {**run(0.2, 0.8, 2.0), "parallel": 3}, run(0.3, 0.7, 3.0)]
    assert results_page.cells(row, seeds) == [
        "[a](recipes/b.md)", "8", "2.0 (3 at a time)",
        "20.0 % (10.0 to 30.0)", "75.0 % (70.0 to 80.0)", "50.0 %", "25.0 %",
    ]  # fmt: skip
