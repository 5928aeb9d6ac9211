"""Damaged run folders (tests/corpora/run_folders.py), as far as opening them goes: what is resumed from, what
is said, what is kept. Whole runs on them are in the campaign.
"""

import json
import shutil

import pytest

from tests.corpora.run_folders import DAMAGES, PROOF
from tests.support.checkpoints import config_in, opened, save
from whetstone.config import dump, make_plan
from whetstone.diagnosis.explain import load_history
from whetstone.errors import UserError
from whetstone.evaluation.evaluator import read_summary
from whetstone.report.read import read_run
from whetstone.run.checkpoint import save_model
from whetstone.run.folder import check_plan, plan_shape
from whetstone.run.metrics import MetricsLog, read_rows
from whetstone.terminal.log import setup_logging


def write_weights(folder):
    (folder / "model.safetensors").write_bytes(b"weights")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run folder with everything that a run leaves, its model a tiny one."""
    folder = tmp_path_factory.mktemp("source") / "r"
    config = config_in(folder.parent, max_steps=3)
    for step in (1, 2, 3):
        save(folder, step)
    save_model(write_weights, folder / "final_model", 3)
    (folder / "config.yaml").write_text(dump(config))
    for name in ("training.log", "train_results.json", "report.html", "completions/step_1.jsonl"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("something")
    rows = [{"step": step, "kind": "train", "reward": 0.5} for step in (1, 2, 3)]
    rows = [{"step": 0, "kind": "eval", "accuracy": 0.0}, *rows, {"step": 3, "kind": "eval", "accuracy": 1.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    share = {"mean": 0.5, "low": 0.0, "high": 1.0, "num_problems": 4}
    summary = {"accuracy": share, "greedy_accuracy": None}
    (folder / "eval_results").mkdir()
    for step in (0, 3):
        document = {"step": step, "summary": summary, "completions": []}
        (folder / "eval_results" / f"eval_step_{step}.json").write_text(json.dumps(document))
    return folder


# What these keep is moved aside when the final model or a checkpoint is written.
LATER = ("final_model", "writing")
# Found when the state is read, with the model at hand.
WITH_MODEL = (".metadata with code in it",)


@pytest.mark.parametrize("name", [name for name in DAMAGES if name not in WITH_MODEL])
def test_a_damaged_run_folder_is_resumed_or_refused(source, tmp_path, name):
    case = DAMAGES[name]
    shutil.copytree(source, tmp_path / "r", symlinks=True)
    folder = tmp_path / "r"
    case.damage(folder)
    config = config_in(tmp_path, max_steps=3, auto_resume=True)
    try:
        _, found, notes = opened(config)
        assert found is not None
        numbers = found.scalars()
    except UserError as error:
        assert case.outcome == "refused", error
        assert all(word in str(error) for word in case.names) and "\n" not in str(error)
    else:
        assert case.outcome == "resumed" and numbers["seconds"] == 1.5
        assert found.step == (case.step or 3)
        setup_logging(folder)
        metrics = MetricsLog(folder, config, resume_step=found.step)
        metrics.log_eval(3, {"accuracy": 1.0})
        metrics.close()
        kept = [(row["kind"], row["step"]) for row in read_rows(folder / "metrics.jsonl")]
        assert len(kept) == len(set(kept)) and kept[-1] == ("eval", 3)
        said = " ".join(notes) + (folder / "training.log").read_text(errors="replace")
        assert all(word in said for word in case.names), said
        read_summary(folder / "eval_results" / "eval_step_0.json")
        if name != "eval_results a file":  # the last evaluation makes it anew
            read_run(folder)  # the report and `whet explain` read the same files
        if any(kind == "train" for kind, _ in kept):
            load_history(folder)
        if "config.yaml" in name:
            assert "max_steps: 3" in (folder / "config.yaml").read_text()
    for pattern in case.kept:
        if not any(word in pattern for word in LATER):
            assert list(folder.glob(pattern)), (pattern, sorted(path.name for path in folder.iterdir()))
    assert not list(tmp_path.rglob(PROOF))


def test_the_state_that_is_read_may_hold_no_code(source, tmp_path):
    import torch

    shutil.copytree(source, tmp_path / "r")
    DAMAGES[".metadata with code in it"].damage(tmp_path / "r")
    _, found, _ = opened(config_in(tmp_path, max_steps=3, auto_resume=True))
    assert found is not None
    with pytest.raises(UserError, match=r"\.metadata"):
        found.load_tensors({"optimizer": {"moment": torch.zeros(2)}})
    assert not list(tmp_path.rglob(PROOF))


def test_a_checkpoint_that_does_not_fit_is_refused_in_a_sentence(source):
    import torch

    _, found, _ = opened(config_in(source.parent, max_steps=3, auto_resume=True))
    assert found is not None
    for into in ({"critic": {"moment": torch.zeros(2)}}, {"optimizer": {"moment": torch.zeros(3)}}):
        with pytest.raises(UserError, match="checkpoint-3"):
            found.load_tensors(into)


def test_another_shape_of_batches_is_refused(source):
    _, found, _ = opened(config_in(source.parent, max_steps=3, auto_resume=True))
    assert found is not None and found.step == 3

    def plan(**keys):
        return make_plan(config_in(source.parent, prompts_per_step=2, **keys), num_problems=100)

    numbers = {"updater": {}, "source": {}, "plan": plan_shape(plan(max_steps=3, num_generations=4))}
    check_plan(found, numbers, plan(max_steps=3, num_generations=4))
    check_plan(found, numbers, plan(max_steps=9, num_generations=4))
    check_plan(found, {**numbers, "plan": plan_shape(plan(num_generations=8))}, plan(num_generations=8))
    with pytest.raises(UserError, match=r"num_generations.* 4.* 8"):
        check_plan(found, numbers, plan(max_steps=3, num_generations=8))
    with pytest.raises(UserError, match=r"num_iterations.* 1.* 2"):
        check_plan(found, numbers, plan(max_steps=4, num_generations=4, num_iterations=2))
    with pytest.raises(UserError, match=r"step 3.* 2 .*max_steps"):
        check_plan(found, numbers, plan(max_steps=2, num_generations=4))
    with pytest.raises(UserError, match=r"scalars\.pt"):
        check_plan(found, {"seconds": 1.0}, plan(max_steps=3, num_generations=4))
