"""README.md shows what the program prints; scripts/make_readme.py writes the block."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.doc_commands import OWN_DATA_COMMANDS
from whetstone import __main__ as cli

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from scripts import make_readme  # noqa: E402

REMEDY = "run python scripts/make_readme.py"
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_plan_in_the_readme_is_the_program_s() -> None:
    shown = make_readme.shown_block(TEXT)
    assert [line for line in make_readme.plan_lines() if line not in shown] == [], REMEDY


def test_the_table_of_gpu_needs_is_the_plan_s() -> None:
    assert make_readme.with_needs(TEXT, make_readme.needs_table()) == TEXT, f"{REMEDY} --needs"


def test_own_data_trains_in_the_three_commands_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"What is {a} + {b}?,{a + b}" for a in range(1, 6) for b in range(1, 6)]
    Path("my_rows.csv").write_text("\n".join(["question,answer", *rows]) + "\n", encoding="utf-8")
    small = "max_steps=1 prompts_per_step=2 num_generations=4 max_completion_length=16 eval_num_samples=2"
    cpu = ["model_name_or_path=pebble", *small.split(), "reward_workers=1", "save_strategy=no"]
    assert [line.split()[1] for line in OWN_DATA_COMMANDS] == ["init", "check", "train"]
    for line in OWN_DATA_COMMANDS:
        words = shlex.split(line)[1:]
        assert cli.run(words if words[0] == "init" else [*words, *cpu]) == 0, line
    result = json.loads(Path("outputs/my_rows/train_results.json").read_text(encoding="utf-8"))
    assert result["steps"] == 1
