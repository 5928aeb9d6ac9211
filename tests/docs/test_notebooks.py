"""notebooks/: valid and small; those for a CPU have outputs, and run from end to end in a kernel (slow)."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.notebooks import FOLDER, execute
from whetstone.config.load import SECTION_OF

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
FOR_GPU = {"gsm8k_one_gpu"}
MAX_BYTES = 200_000


def cells(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def code(path: Path) -> str:
    return "\n".join("".join(cell["source"]) + "\n" for cell in cells(path) if cell["cell_type"] == "code")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_and_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    document = json.loads(text)
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 5) and len(text) < MAX_BYTES
    assert len({cell["id"] for cell in cells(path)}) == len(cells(path)) >= 8
    for cell in cells(path):
        assert cell["cell_type"] in ("code", "markdown") and isinstance(cell["source"], list)
        if cell["cell_type"] == "code":
            ast.parse("".join(cell["source"]))
            assert (cell["execution_count"] is None) == (path.stem in FOR_GPU)
            assert not any(output["output_type"] == "error" for output in cell["outputs"])
    for private in ("/home/", "/root", "/tmp", "\\u001b"):
        assert private not in text, "outputs hold no paths of a machine and no control characters"
    (first, *_) = cells(path)
    assert ("not run" in "".join(first["source"])) == (path.stem in FOR_GPU)


@pytest.mark.parametrize("name", ["quickstart", "own_task"])
def test_the_outputs_have_plots_and_accuracy(name: str) -> None:
    outputs = [output for cell in cells(FOLDER / f"{name}.ipynb") for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 1
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    assert "before" in printed and "after" in printed


def test_keys_of_the_notebooks_exist() -> None:
    """Settings of the notebook that no test runs, too."""
    tree = ast.parse(code(FOLDER / "gsm8k_one_gpu.ipynb"))
    settings = [
        ast.literal_eval(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SETTINGS"
    ]
    aliases = {"data_path", "eval_path"}  # of the rows: config/data_keys.py
    assert settings and set(settings[0]) <= set(SECTION_OF) | aliases


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "run_name"), [("quickstart", "quickstart"), ("own_task", "larger"), ("own_rows", "own_rows")]
)
def test_a_notebook_runs_from_end_to_end(name: str, run_name: str, tmp_path: Path) -> None:
    """As it is, in a kernel of its own: minutes."""
    pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="pip install nbclient ipykernel")
    notebook = execute(FOLDER / f"{name}.ipynb", tmp_path)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not any("text/html" in output.get("data", {}) for output in outputs), "log lines are plain text"
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    run = tmp_path / "outputs" / run_name
    results = json.loads((run / "train_results.json").read_text())
    assert results["accuracy_after"]["low"] > results["accuracy_before"]["high"]
    assert (run / "export").is_dir() == (name == "quickstart")
