"""`whet tasks NAME` lists the settings of a task with their defaults, and they are the real ones."""

import json
import re
from pathlib import Path

import pytest

from whetstone.__main__ import run
from whetstone.commands.tasks import _print_settings, config_for_task
from whetstone.tasks.registry import list_tasks, make_task, settings_of


def listed(text: str) -> dict[str, str]:
    return dict(re.findall(r"^  (\w+) +(\S.*)$", text.split("\n\n")[0], flags=re.MULTILINE))


def test_settings_and_defaults_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tasks", "chain_sum", "max_terms=3"]) == 0
    table = listed(capsys.readouterr().out)
    assert table["min_terms"] == "2" and table["max_terms"] == "6  (now 3)"
    assert set(table) == {"min_terms", "max_terms", "min_digits", "max_digits", "allow_negation"}


def test_a_task_without_rows_lists_them_before_it_asks_for_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tasks", "math"]) == 2
    table = listed(capsys.readouterr().out)
    assert table["eval_fraction"] == "0.05" and "answer_column" in table


def test_every_task_has_settings_that_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    without = [task.name for task in list_tasks() if not settings_of(task.name)]
    assert without == ["list_functions"]
    for task in list_tasks():
        values = settings_of(task.name)
        _print_settings(task.name, {})
        lines = [line for line in capsys.readouterr().out.splitlines()[1:] if line]
        longest = max(map(len, values), default=0) + len("    ") + 90
        assert len(lines) == len(values) and all(len(line) <= longest for line in lines), task.name
    assert settings_of("no_such_task") == {}


@pytest.mark.parametrize("name", ["chain_sum", "countdown", "syllogism", "aiw"])
def test_the_defaults_are_what_a_task_uses(name: str) -> None:
    """A problem made with every default written out is the one made without."""
    given = {key: value for key, value in settings_of(name).items() if value is not None and key != "split"}
    if name == "countdown":
        given.pop("eval_fraction")
    plain, written = (config_for_task(name, {}), config_for_task(name, {}))
    written.tasks.datasets[name].config.update(given)
    problems = [make_task(c, name, c.tasks.datasets[name], "train").problem(3) for c in (plain, written)]
    assert problems[0].question == problems[1].question


def test_an_answer_shows_every_part_of_its_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = "<think>1</think><answer>3</answer>"
    assert run(["tasks", "gcd", "--answer", answer, "reward_funcs=[accuracy,format]"]) == 0
    assert ", format 1" in capsys.readouterr().out
    file = tmp_path / "rows.jsonl"
    tests = [{"args": [2], "expected": 4}, {"args": [3], "expected": 9}]
    file.write_text(json.dumps({"description": "Square.", "function": "f", "tests": tests}) + "\n")
    words = ["tasks", "code", f"path={file}", "language=python", "eval_num_samples=0"]
    assert run([*words, "--answer", "def f(x): return 4"]) == 0
    shown = capsys.readouterr()
    assert "tests: passed, wrong" in shown.out and "nothing uses" not in shown.err


@pytest.mark.parametrize(
    ("task", "complaint"),
    [
        ("chain_sums: {}", "did you mean 'chain_sum'"),
        ("chain_sum: {config: {min_term: 2}}", "did you mean 'min_terms'"),
        ("math: {config: {path: none.jsonl, anser_column: a}}", "did you mean 'answer_column'"),
    ],
)
def test_config_knows_tasks_and_their_settings(
    task: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"datasets: {{{task}}}\n")
    assert run(["config", str(file)]) == 2
    assert complaint in capsys.readouterr().err
    file.write_text("datasets: {chain_sum/hard: {config: {min_terms: 2}}}\nmax_steps: 1\n")
    assert run(["config", str(file)]) == 0
