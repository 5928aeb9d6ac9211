"""`whet init`: what it writes for rows of each kind, what it shows, what it refuses; the YAML trains."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from whetstone import __main__ as cli
from whetstone.config import load
from whetstone.tasks.registry import make_tasks

SUMS = [{"id": k, "question": f"What is {k} + {k}?", "answer": str(2 * k)} for k in range(1, 13)]
POEMS = [
    {"prompt": f"Write a line about {word}.", 'odd """ name': 1} for word in ("rain", "fog", "sun", "sea")
]
CODE = [
    {"text": f"Write a function to add {k}.", "code": f"def plus(x): return x + {k}",
     "test_list": [f"assert plus(1) == {k + 1}"], "test_setup_code": ""}
    for k in range(4)
]  # fmt: skip
NUMBERS = [{"nums": [k, 2, 3], "target": k + 5} for k in range(1, 5)]


def csv(rows: list[dict[str, Any]], path: Path) -> None:
    lines = [",".join(map(str, line)) for line in (rows[0], *(row.values() for row in rows))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def jsonl(rows: list[dict[str, Any]], path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def parquet(rows: list[dict[str, Any]], path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def paid(told: str) -> dict[str, str]:
    """probe -> the mean reward that the table shows."""
    table = [line.split() for line in told.splitlines() if line.rstrip().endswith(" ms")]
    return {" ".join(words[:-6]): words[-3] for words in table}


@pytest.mark.parametrize(
    ("write", "rows", "kind", "gold"),
    [
        (csv, SUMS, "rows", "<answer>4</answer>"),
        (jsonl, SUMS, "rows", "<answer>4</answer>"),
        (parquet, SUMS, "rows", "<answer>4</answer>"),
        (jsonl, CODE, "code", "def plus(x): return x + 2"),
        (jsonl, NUMBERS, "countdown", "<answer>("),
    ],
)
def test_rows_with_answers(
    write: Callable[..., None], rows: list[dict[str, Any]], kind: str, gold: str, capsys: Any
) -> None:
    file = f"my rows.{write.__name__}"
    write(rows, Path(file))
    assert cli.run(["init", file]) == 0
    told = capsys.readouterr().out
    assert gold in told and told.count(" gold answer ") == 3
    best = "2.00" if kind == "code" else "1.00"
    rewards = paid(told)
    assert rewards["gold"] == best and rewards["no text"] == "0.00"
    assert float(rewards["one character"]) < 0.2 and float(rewards["other gold"]) < 0.2
    assert told.endswith("Next:\n  whet check my_rows.yaml\n  whet train my_rows.yaml\n")
    assert "with the model Qwen/Qwen2.5-1.5B-Instruct (or pebble" in told
    written = yaml.safe_load(Path("my_rows.yaml").read_text(encoding="utf-8"))
    assert written["datasets"] == {kind: {"config": {"path": file, "eval_fraction": 0.1}}}
    assert written["reward_funcs"] == ["accuracy"] and ("developer_prompt" in written) == (kind == "rows")
    assert cli.run(["config", "my_rows.yaml"]) == 0
    assert not list(Path().glob("*.py"))


def test_a_folder_is_evaluated_on_its_test_split(capsys: Any) -> None:
    Path("sums").mkdir()
    jsonl(SUMS[:8], Path("sums/train.jsonl"))
    jsonl(SUMS[8:], Path("sums/test.jsonl"))
    assert cli.run(["init", "sums"]) == 0
    assert "8 rows of sums: 8 to train on; prompt from question" in capsys.readouterr().out
    assert len(make_tasks(load("sums.yaml").config, "eval")["rows"]) == 4


def test_completions_are_answers_and_system_messages_are_kept(capsys: Any) -> None:
    rows = [{"prompt": f"What is {k} + {k}?", "completion": str(2 * k)} for k in range(1, 13)]
    jsonl(rows, Path("plain.jsonl"))
    jsonl([{"system": "Be brief.", **row} for row in rows], Path("system.jsonl"))
    for name in ("plain", "system"):
        assert cli.run(["init", f"{name}.jsonl"]) == 0
        assert paid(capsys.readouterr().out)["gold"] == "1.00"
        config = load(f"{name}.yaml").config
        assert config.tasks.reward_funcs == ["accuracy"]
        first = make_tasks(config, "train")["rows"].problem(0).messages[0]
        assert first["content"].startswith("Be brief." if name == "system" else "Think first.")


def test_rows_without_answers_get_a_reward_that_trains(capsys: Any) -> None:
    jsonl(POEMS, Path("poems.jsonl"))
    assert cli.run(["init", "poems.jsonl"]) == 0
    told = capsys.readouterr().out
    assert "poems_reward.py is written" in told and "user: Write a line about" in told
    assert paid(told) == {"no text": "0.00", "no answer": "0.08"}  # 4 words of 50
    assert load("poems.yaml").config.tasks.reward_funcs == ["poems_reward.py:reward"]
    small = "num_generations=2 prompts_per_step=2 max_completion_length=8 eval_num_samples=2 reward_workers=1"
    words = ["train", "poems.yaml", "model_name_or_path=pebble", "max_steps=1", "preflight=warn"]
    assert cli.run([*words, *small.split(), "save_strategy=no", "eval_greedy=false"]) == 0
    result = json.loads((Path("outputs") / "poems" / "train_results.json").read_text())
    assert result["steps"] == 1


def test_settings_of_the_rows_are_written(capsys: Any) -> None:
    jsonl([{"q": f"What is {k}?", "a": k} for k in range(4)], Path("odd.jsonl"))
    assert cli.run(["init", "odd.jsonl"]) == 2
    assert "set prompt_column to one of its columns (q, a)" in capsys.readouterr().err
    assert cli.run(["init", "odd.jsonl", "prompt_column=q", "answer_column=a", "run_name=x/y"]) == 0
    config = load("x_y.yaml").config
    settings = config.tasks.datasets["rows"].config
    assert (settings["prompt_column"], settings["answer_column"]) == ("q", "a")
    assert make_tasks(config, "train")["rows"].problem(0).messages[-1]["content"].startswith("What is ")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "Name the data first"),
        (["notes.txt"], "notes.txt, whose kind is not known"),
        (["broken.jsonl"], "broken.jsonl of task rows is not readable as jsonl"),
        (["missing.csv"], "missing.csv, which is not there"),
        (["one.jsonl"], "too few different questions"),
        (["sums.csv", "max_steps=3"], "no setting 'max_steps'"),
        (["sums.csv", "run_name=there"], "there.yaml is there already"),
        (["sums.csv", "run_name=mine"], "mine_reward.py is there already"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(
    arguments: list[str], complaint: str, folder: Path, capsys: Any
) -> None:
    csv(SUMS, Path("sums.csv"))
    jsonl(SUMS[:1], Path("one.jsonl"))
    Path("notes.txt").write_text("hello")
    Path("broken.jsonl").write_text("hello\n")
    Path("there.yaml").write_text("seed: 7\n")
    Path("mine_reward.py").write_text("mine = 1\n")
    before = {path: path.read_text() for path in folder.iterdir()}
    assert cli.run(["init", *arguments]) == 2
    told = capsys.readouterr().err
    assert complaint in told and told.count("\n") <= 2, told
    assert {path: path.read_text() for path in folder.iterdir()} == before  # nothing is written
