"""The end of a run: results that nothing after them can lose."""

import json
import logging
from pathlib import Path

import pytest

from tests.diagnosis.test_constructed_runs import CASES, make_run
from whetstone.report.results import write_results


def finish(folder: Path, caplog: pytest.LogCaptureFixture, steps: int) -> tuple[dict, list[str]]:
    """(results, messages) of the end of a run; the file holds the same results."""
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="whetstone"):
        results = write_results(folder, steps=steps, model_step=steps, seconds=9.0)
    assert json.loads((folder / "train_results.json").read_text()) == results
    return results, [record.getMessage() for record in caplog.records if record.name == "whetstone"]


def test_a_steep_end_and_the_numbers_of_the_last_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_run(tmp_path, CASES["steep end"])
    (folder / "final_model").mkdir()
    results, said = finish(folder, caplog, 30)
    assert any(line.startswith("Diagnosis: Healthy: it learns.") for line in said)
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 30 and results["last_step"]["accuracy"] == last["accuracy"] > 0.8
    assert {"loss", "reward", "grad_norm", "learning_rate", "entropy"} <= set(results["last_step"])


def test_what_fails_after_training_loses_no_result(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The run's push comes after `write_results`, so it must come back whatever is in the way."""
    folder = make_run(tmp_path, CASES["slow"])
    for blocked in ("final_model/README.md/a", "report.html/a"):
        (folder / blocked).mkdir(parents=True)
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("num_generations: 8", "num_generations: eight"))
    results, said = finish(folder, caplog, 200)
    assert results["steps"] == 200 and results["accuracy_after"]["mean"] > results["accuracy_before"]["mean"]
    failed = [line.split(" failed")[0] for line in said if "are saved" in line]
    assert failed == ["The model card", "The report", "The diagnosis"]
    assert "Next:" in said and not any("open it in a browser" in line for line in said)
