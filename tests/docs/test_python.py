"""docs/python.md: its code runs as a script, in order, on a small form of the recipe that it names."""

import json
import re
import runpy
from pathlib import Path

import pytest
import yaml

import whetstone
from whetstone.config.load import find

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/python.md").read_text(encoding="utf-8")
SMALL = {
    "prompts_per_step": 2, "num_generations": 2, "max_completion_length": 16, "reward_workers": 1,
    "eval_num_samples": 2, "fixed_eval_steps": 2, "preflight": "off",
}  # fmt: skip


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "page.py"
    script.write_text("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)))
    recipe = yaml.safe_load(find("quickstart").read_text(encoding="utf-8"))
    (tmp_path / "quickstart").write_text(yaml.safe_dump({**recipe, **SMALL}))  # found before the shipped one
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path(str(script), run_name="__main__")

    run = names["run"]
    trained = [row for row in run.metrics if row["kind"] == "train"]
    assert [row["step"] for row in trained] == [1, 2]
    assert -5 < trained[0]["rewards/short/mean"] < 0
    assert run.folder == Path("outputs/quickstart") and run.report.is_file()
    assert sum(parameter.numel() for parameter in names["model"].parameters()) > 1_000_000
    last = names["step"]
    rows = whetstone.Run("outputs/by_steps").metrics
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, last.step + 1))
    assert last.step == 4 or last.metrics["entropy"] < 0.1
    assert Path(f"outputs/by_steps/checkpoint-{last.step}").is_dir()
    evaluated = run.folder / "evaluations/final_model/eval_results/eval_step_2.json"
    assert json.loads(evaluated.read_text())["summary"]["accuracy"]["num_problems"] == 2
    assert len(names["answers"]) == 2 and len(names["chat"].messages) == 6
    assert names["piece"].answer.text == names["chat"].messages[-1]["content"]
    assert names["token"].likeliest[0][1] >= names["token"].logprob


def test_the_page_has_every_name() -> None:
    assert [name for name in whetstone.__all__ if f"whetstone.{name}(" not in PAGE] == []
