"""status.json says what a run does, and how it ended."""

import json
import time
from pathlib import Path

import pytest

from tests.support.waiting import wait_until
from whetstone.errors import UserError
from whetstone.run.status import StatusFile
from whetstone.terminal.stages import show, stage


def read(folder: Path) -> dict:
    return json.loads((folder / "status.json").read_text())


def test_stages_appear_while_they_last(tmp_path: Path) -> None:
    with StatusFile(tmp_path, interval_s=0.02):
        assert read(tmp_path)["state"] == "running" and read(tmp_path)["stages"] == []
        with stage("evaluation"), stage("sampling", total=8) as inner:
            inner.count = 3
            show("How many?", "x" * 9999)
            wait_until(lambda: read(tmp_path)["stages"] == [["evaluation", "sampling 3/8"]])
    status = read(tmp_path)
    assert status["state"] == "ended" and status["stages"] == [] and "reason" not in status
    assert status["newest"] == ["How many?", "x" * 4000]
    assert abs(status["time"] - time.time()) < 60 and status["started"] <= status["time"]


@pytest.mark.parametrize(
    ("error", "reason"), [(UserError("Lower it."), "Lower it."), (KeyError("x"), "KeyError: 'x'")]
)
def test_a_failure_has_its_reason(tmp_path: Path, error: Exception, reason: str) -> None:
    with pytest.raises(type(error)), StatusFile(tmp_path):
        raise error
    assert (read(tmp_path)["state"], read(tmp_path)["reason"]) == ("failed", reason)


def test_status_without_folder_or_on_other_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with StatusFile(folder, interval_s=0.01):
        folder.rename(tmp_path / "elsewhere")
        time.sleep(0.05)
    with StatusFile(tmp_path, is_main=False):
        pass
    assert not (tmp_path / "status.json").exists()
