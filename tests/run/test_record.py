"""run.json: what ran, where, by which command and when; one entry for each session."""

import json
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import torch
import transformers

from whetstone import __version__
from whetstone.report.page import page
from whetstone.report.read import read_run
from whetstone.run.record import NAME, began_at, commit, read_sessions, record_session


def test_a_session_says_what_ran_where_and_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/whetstone/__main__.py", "train", "run_name=a b"])
    entry = record_session(tmp_path, num_ranks=2)
    assert read_sessions(tmp_path) == [entry]
    assert entry["whetstone"] == __version__
    assert entry["torch"] == torch.__version__ and entry["transformers"] == transformers.__version__
    assert entry["command"] == "whet train 'run_name=a b'"
    assert entry["num_ranks"] == 2 and entry["resumed_from_step"] is None
    assert entry["machine"]["cores"] >= 1 and entry["machine"]["memory_gb"] > 0.1
    assert abs(datetime.fromisoformat(entry["started"]) - datetime.now().astimezone()) < timedelta(minutes=5)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]  # nothing half written beside it


def test_a_resumed_run_appends_and_a_new_one_begins_anew(tmp_path: Path) -> None:
    record_session(tmp_path)
    record_session(tmp_path, resumed_from=4)
    assert [entry["resumed_from_step"] for entry in read_sessions(tmp_path)] == [None, 4]
    record_session(tmp_path)
    assert len(read_sessions(tmp_path)) == 1


def test_a_run_began_with_its_first_session(tmp_path: Path) -> None:
    first = record_session(tmp_path)["started"]
    record_session(tmp_path, resumed_from=4)
    assert began_at(tmp_path) == first
    assert began_at(None) is None is began_at(tmp_path / "nothing")
    for started in ('"<b>"', "3", "null"):
        (tmp_path / NAME).write_text(f'{{"sessions": [{{"started": {started}}}]}}')
        assert began_at(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"sessions": 3}', '{"sessions": [1]}', "\udcff"])
def test_a_broken_file_is_written_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text, errors="surrogateescape")
    assert read_sessions(tmp_path) == []
    record_session(tmp_path, resumed_from=2)
    assert len(json.loads((tmp_path / NAME).read_text())["sessions"]) == 1


def test_the_commit_is_that_of_our_own_tree() -> None:
    found = commit()
    is_checkout = (Path(__file__).resolve().parents[2] / ".git").exists()
    assert (found is None) or (is_checkout and len(found.removesuffix("-dirty")) >= 12)


def test_the_report_has_date_and_version(tmp_path: Path) -> None:
    entry = record_session(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "kind": "train", "reward": 0.5}\n')
    text = page(read_run(tmp_path))
    assert entry["started"][:10] in text and f"whetstone {__version__}" in text
    (tmp_path / NAME).write_text('{"sessions": [{"started": "<b>", "whetstone": "<script>"}]}')
    text = page(read_run(tmp_path))
    assert "<script>" not in text and "&lt;script&gt;" in text
