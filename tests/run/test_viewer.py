"""The page beside a run: its address is logged, and neither its end nor its absence hurts the run."""

import logging
import os
import signal
import urllib.request
from pathlib import Path

import pytest

from tests.support.waiting import wait_until
from whetstone.run.viewer import Viewer, is_wanted


def address_of(viewer: Viewer) -> str:
    return wait_until(lambda: viewer.address) or ""


def test_the_page_is_served_until_the_run_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run.json").write_text("{}")
    caplog.set_level(logging.INFO, logger="whetstone")
    with Viewer(tmp_path, is_wanted=True) as viewer:
        address = address_of(viewer)
        with urllib.request.urlopen(f"{address}/api/runs", timeout=30) as answer:
            assert answer.status == 200
        assert address.startswith("http://127.0.0.1:")
        process = viewer._process
    assert process is not None and process.poll() is not None
    assert any(address in record.message for record in caplog.records)
    with pytest.raises(OSError):
        urllib.request.urlopen(address, timeout=5)


def test_a_viewer_that_is_killed_is_no_matter(tmp_path: Path) -> None:
    with Viewer(tmp_path, is_wanted=True) as viewer:
        assert viewer._process is not None
        os.kill(viewer._process.pid, signal.SIGKILL)
    with Viewer(tmp_path, is_wanted=False) as viewer:
        assert viewer._process is None


@pytest.mark.parametrize("is_terminal", [True, False])
def test_auto_is_for_terminals(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    assert is_wanted("auto") is is_terminal
    assert is_wanted(True) and not is_wanted(False)
