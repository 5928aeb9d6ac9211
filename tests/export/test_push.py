"""`whet push` by the real huggingface_hub, against a stand-in of the hub's HTTP interface."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.exports import make_run, tiny_model
from tests.support.hub import TOKEN, Hub, serve_hub
from tests.support.runs import words
from whetstone.__main__ import run as whet
from whetstone.config import load
from whetstone.export.push import push_final
from whetstone.train import train


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serve_hub() as served:
        yield served


@pytest.fixture(scope="module")
def adapter_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    make_run(place / "sums", str(tiny_model(place / "base")), use_peft=True, lora_r=4)
    return place / "sums"


@pytest.fixture(autouse=True)
def account(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.address)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    # The stand-in has no Xet storage: large files go by LFS.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    hub.private.clear()
    hub.files.clear()
    hub.requests.clear()
    hub.broken = ""


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence of a command that can't work."""
    assert whet(["push", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("whet: ") and error.count("\n") == 1
    return error


def test_all_files_of_the_model_arrive_and_nothing_else(hub: Hub, adapter_run: Path) -> None:
    folder = adapter_run / "final_model"
    assert whet(["push", str(adapter_run), "ada/sums"]) == 0
    assert hub.private == {"ada/sums": True} and "final_model" in hub.messages[-1]
    names = {path.name for path in folder.iterdir()} - {"whetstone.json"}
    assert set(hub.files["ada/sums"]) == names and "adapter_model.safetensors" in names
    for name, content in hub.files["ada/sums"].items():
        assert content == (folder / name).read_bytes(), name


def test_a_dry_run_uploads_nothing(
    hub: Hub, adapter_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    assert whet(["push", str(adapter_run / "final_model"), "ada/sums", "--dry-run", "--public"]) == 0
    first, *rows = capsys.readouterr().out.splitlines()
    assert "ada/sums" in first and "public" in first and hub.requests == []
    assert {row.split()[0] for row in rows} >= {"README.md", "adapter_model.safetensors", "tokenizer.json"}


def test_a_name_that_is_taken_needs_update(
    hub: Hub, adapter_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert whet(["push", str(adapter_run), "sums", "--public"]) == 0
    assert hub.private == {"ada/sums": False}
    assert "--update" in error_of(capsys, str(adapter_run), "ada/sums", "--public")
    # What is private by default does not land in a public repository.
    before = len(hub.messages)
    assert "--public" in error_of(capsys, str(adapter_run), "ada/sums", "--update")
    assert len(hub.messages) == before
    assert whet(["push", str(adapter_run), "ada/sums", "--update", "--public"]) == 0
    assert len(hub.messages) == before + 1


def test_errors_are_one_sentence_with_the_remedy(
    hub: Hub,
    adapter_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = str(adapter_run)
    assert "name of your own" in error_of(capsys, run, "others/sums")
    assert "OWNER/NAME" in error_of(capsys, run, "a/b/c")
    assert "OWNER/NAME" in error_of(capsys, run, "../../etc")
    assert "no weights" in error_of(capsys, str(tmp_path), "sums")
    assert "no folder" in error_of(capsys, "pebble", "sums")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "hf auth login" in error_of(capsys, run, "sums")
    hub.broken = "/commit/"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "500" in error_of(capsys, run, "sums")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "network" in error_of(capsys, run, "sums")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)  # this machine may have one
    assert "HF_TOKEN" in error_of(capsys, run, "sums")


def test_a_run_survives_a_hub_that_fails_and_can_be_pushed_later(hub: Hub, tmp_path: Path) -> None:
    small = {"max_steps": 1, "eval_num_samples": 2, "max_completion_length": 8, "push_to_hub": True}
    loaded = load(None, words(tmp_path, **small, save_strategy="no", hub_model_id="ada/trained"))
    hub.broken = "/api/repos/create"
    results = train(loaded)
    run = tmp_path / "run"
    assert results["steps"] == 1 and (run / "report.html").is_file() and hub.private == {}
    assert json.loads((run / "train_results.json").read_text()) == results
    (again,) = re.findall(r"`(whet push .*)`", (run / "training.log").read_text())
    hub.broken = ""
    assert whet(shlex.split(again)[1:]) == 0
    assert hub.private == {"ada/trained": True}
    card = hub.files["ada/trained"].pop("README.md").decode()
    assert "## Measured" in card and str(tmp_path) not in card
    push_final(loaded.config, run)  # what the run does at its end: into its repository once more
    assert "README.md" in hub.files["ada/trained"]


@pytest.mark.slow
def test_the_command_works_in_a_process_of_its_own(hub: Hub, adapter_run: Path) -> None:
    command = [sys.executable, "-m", "whetstone", "push", str(adapter_run), "sums"]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)
    assert done.returncode == 0 and f"{hub.address}/ada/sums" in done.stdout, done.stderr
