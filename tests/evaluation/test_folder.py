"""`whet eval` writes beside the checkpoint, or where it may, and names what it measured."""

import contextlib
from pathlib import Path

import pytest

from whetstone.config import Config, load
from whetstone.errors import UserError
from whetstone.run.eval_only import evaluation_folder, step_of, title_of


def configure(tmp_path: Path, weights: Path | None) -> Config:
    words = [f"output_dir={tmp_path / 'elsewhere'}", "run_name=r"]
    return load("quickstart", [*words, *([] if weights is None else [f"checkpoint_path={weights}"])]).config


@pytest.fixture
def locks():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "outputs" / "quickstart"
    for name in ("final_model", "checkpoint-20"):
        (folder / name).mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 1\n")
    (folder / "train_results.json").write_text('{"steps": 30, "seconds": 1.0}')
    return folder


def test_results_lie_beside_the_checkpoint(tmp_path: Path, run: Path, locks) -> None:
    for name in ("final_model", "checkpoint-20"):
        assert evaluation_folder(configure(tmp_path, run / name), locks) == run / "evaluations" / name
        assert (run / "evaluations" / name).is_dir()
    assert not (tmp_path / "elsewhere").exists()


def test_unwritable_run_has_results_in_configured_folder(tmp_path: Path, run: Path, locks) -> None:
    (run / "evaluations").write_text("a file in the way")  # root may write to any folder, but not into a file
    config = configure(tmp_path, run / "final_model")
    assert evaluation_folder(config, locks) == tmp_path / "elsewhere" / "r" / "evaluations" / "final_model"
    locks.close()
    (tmp_path / "elsewhere" / "r" / "evaluations" / "final_model").rmdir()
    (tmp_path / "elsewhere" / "r" / "evaluations" / "final_model").write_text("also in the way")
    with pytest.raises(UserError, match="output_dir"):
        evaluation_folder(config, locks)


def test_model_outside_runs_has_results_in_configured_folder(tmp_path: Path, locks) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    config = configure(tmp_path, tmp_path / "models" / "mine")
    assert evaluation_folder(config, locks) == tmp_path / "elsewhere" / "r" / "evaluations" / "mine"
    assert evaluation_folder(configure(tmp_path, None), locks).name == "model"


def test_the_step_is_the_checkpoints(tmp_path: Path, run: Path) -> None:
    assert step_of(run / "checkpoint-20") == 20
    assert step_of(run / "final_model") == 30
    assert (
        title_of(configure(tmp_path, run / "final_model")) == f"Evaluation of {run / 'final_model'} (step 30)"
    )
    assert title_of(configure(tmp_path, None)) == "Evaluation of pebble"
    for broken in ("", "[]", '{"steps": "many"}', "null"):
        (run / "train_results.json").write_text(broken)
        assert step_of(run / "final_model") is None
    assert step_of(tmp_path / "models" / "mine") is None
