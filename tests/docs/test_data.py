"""Every command of docs/data.md, run on the files that the page shows."""

import shlex
from pathlib import Path

import pytest

from tests.support.doc_commands import BLOCKS, COMMANDS
from whetstone import __main__ as cli

SMALL = [
    *(
        "max_steps=1",
        "prompts_per_step=2",
        "num_generations=2",
        "max_completion_length=8",
        "reward_workers=1",
    ),
    *("eval_num_samples=2", "eval_greedy=false", "save_strategy=no", "output_dir=out", "preflight=off"),
]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for _, name, text in BLOCKS:
        if name:
            (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.mark.parametrize("line", COMMANDS)
def test_command_works_as_written(files: Path, capsys: pytest.CaptureFixture[str], line: str):
    argv = shlex.split(line)[1:]
    if "my_rows.yaml" in argv:
        assert cli.run(["init", "my_rows.jsonl"]) == 0
    code = cli.run([*argv, *(SMALL if argv[0] == "train" else [])])
    told = capsys.readouterr()
    if "gsm8k" in line and code == 2:  # no network here: the sentence names it
        assert "openai/gsm8k" in told.err
        return
    assert (code, told.err if code else "") == (0, "")
    if argv[0] == "train":
        assert list((files / "out").rglob("train_results.json"))
