"""docs/results.md has the tables of the kept runs."""

import importlib
import sys
from pathlib import Path

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
