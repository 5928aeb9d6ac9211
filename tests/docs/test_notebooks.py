"""notebooks/: valid, without outputs; the code of those for a CPU runs in order (slow), on small settings."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from whetstone.config.load import SECTION_OF, find

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SMALL = {
    "max_steps": 2, "prompts_per_step": 2, "num_generations": 2, "max_completion_length": 16,
    "reward_workers": 1, "eval_num_samples": 2, "fixed_eval_steps": 1, "preflight": "off",
}  # fmt: skip


def cells(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def code(path: Path) -> str:
    return "\n".join("".join(cell["source"]) + "\n" for cell in cells(path) if cell["cell_type"] == "code")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_and_has_no_outputs(path: Path) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in cells(path)}) == len(cells(path)) >= 8
    for cell in cells(path):
        assert cell["cell_type"] in ("code", "markdown") and isinstance(cell["source"], list)
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            ast.parse("".join(cell["source"]))
    (first, *_) = cells(path)
    assert ("not run" in "".join(first["source"])) == (path.stem == "gsm8k_one_gpu")


def test_keys_of_the_notebooks_exist() -> None:
    """Settings of the notebook that no test runs, too."""
    tree = ast.parse(code(ROOT / "notebooks" / "gsm8k_one_gpu.ipynb"))
    settings = [
        ast.literal_eval(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SETTINGS"
    ]
    aliases = {"data_path", "eval_path"}  # of the rows: config/data_keys.py
    assert settings and set(settings[0]) <= set(SECTION_OF) | aliases


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart", "own_task"])
def test_the_code_of_a_notebook_runs(name: str, tmp_path: Path) -> None:
    recipe = yaml.safe_load(find("quickstart").read_text(encoding="utf-8"))
    (tmp_path / "quickstart").write_text(yaml.safe_dump({**recipe, **SMALL}))  # found before the shipped one
    text = code(ROOT / "notebooks" / f"{name}.ipynb")
    for key, value in {"prompts_per_step": 2, "num_generations": 2, "eval_num_samples": 2}.items():
        text = re.sub(rf"{key}=\d+", f"{key}={value}", text)
    text = text.replace("STEPS = 60", "STEPS = 2").replace(
        'run_name="larger",', 'preflight="off", run_name="larger",'
    )
    (tmp_path / "notebook.py").write_text(text)
    environment = {**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "notebook.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "outputs" / ("quickstart" if name == "quickstart" else "larger")
    assert json.loads((run / "train_results.json").read_text())["steps"] == 2
    assert (run / "export").is_dir() == (name == "quickstart")
    assert "before" in done.stdout and "after" in done.stdout
