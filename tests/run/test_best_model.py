"""`load_best_model_at_end`: final_model is that of the best evaluation, and so is what is said about it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import make_policy
from tests.support.checkpoints import config_in, opened, save
from whetstone.config import Config, build, ineffective_settings, load, make_plan
from whetstone.errors import UserError
from whetstone.model.manifest import read_manifest
from whetstone.report.read import read_run
from whetstone.run.best_model import BestModel
from whetstone.run.checkpoint import save_model
from whetstone.train import train

EASY = "datasets={chain_sum: {config: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}}"


@pytest.fixture(scope="module")
def ruined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose model is worse at the end: its learning rate is far too high."""
    place = tmp_path_factory.mktemp("runs")
    words = [
        EASY, "learning_rate=0.03", "warmup_steps=2", "max_steps=3", "prompts_per_step=2",
        "num_generations=4",
        "max_completion_length=32", "eval_num_samples=30", "fixed_eval_steps=1", "save_steps=1",
        "eval_num_examples_to_print=0", "reward_workers=1", "preflight=off", "load_best_model_at_end=true",
        f"output_dir={place}", "run_name=ruined",
    ]  # fmt: skip
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train(load("quickstart", words))
    torch.set_num_threads(threads)
    return place / "ruined"


def accuracy(run: Path, step: int) -> float:
    return json.loads((run / f"eval_results/eval_step_{step}.json").read_text())["summary"]["accuracy"][
        "mean"
    ]


def test_the_final_model_is_the_best_one(ruined: Path) -> None:
    accuracies = {step: accuracy(ruined, step) for step in (1, 2, 3)}
    best = max(accuracies, key=lambda step: accuracies[step])
    assert accuracies[best] > accuracies[3]  # else nothing is tested here
    final = ruined / "final_model"
    assert read_manifest(final).step == best
    weights = (final / "model.safetensors").read_bytes()
    assert weights == (ruined / f"checkpoint-{best}" / "model.safetensors").read_bytes()
    assert weights != (ruined / "checkpoint-3" / "model.safetensors").read_bytes()
    assert not (ruined / "best_model").exists()
    results = json.loads((ruined / "train_results.json").read_text())
    assert results["model_step"] == best and results["steps"] == 3
    assert results["accuracy_after"]["mean"] == accuracies[best]
    last = read_run(ruined).last
    assert last is not None and last.step == best
    log = (ruined / "training.log").read_text()
    assert f"It is that of step {best}, which had the best evaluation" in log


def test_a_resumed_run_knows_what_it_had_kept(tmp_path: Path) -> None:
    policy = make_policy("llama")

    def write_model(folder: Path) -> None:
        (folder / "weights").write_text("kept")

    save_model(write_model, tmp_path / "best_model", 4)
    (tmp_path / "eval_results").mkdir()
    assert BestModel(tmp_path, policy, enabled=True).step is None  # its evaluation is not there
    interval = {"mean": 0.5, "low": 0.4, "high": 0.6, "num_problems": 90}
    summary: dict[str, Any] = {"accuracy": interval, "greedy_accuracy": None, "is_judged": True}
    (tmp_path / "eval_results" / "eval_step_4.json").write_text(json.dumps({"summary": summary}))
    best = BestModel(tmp_path, policy, enabled=True)
    assert best.step == 4
    assert best.publish(write_model, tmp_path / "final_model", 9) == 4
    assert read_manifest(tmp_path / "final_model").step == 4
    again = BestModel(tmp_path, policy, enabled=True)  # more steps after its end: the best one is not lost
    assert again.step == 4 and again.publish(write_model, tmp_path / "final_model", 12) == 4
    assert (tmp_path / "final_model" / "weights").read_text() == "kept"
    assert BestModel(tmp_path, policy, enabled=False).publish(write_model, tmp_path / "other", 9) == 9


def test_what_an_abandoned_attempt_left_is_not_published(tmp_path: Path) -> None:
    run = save(tmp_path / "r", 20).parent
    save(run, 40)

    def write_old(folder: Path) -> None:
        (folder / "weights").write_text("old")

    for name, step in (("best_model", 40), ("final_model", 40)):
        save_model(write_old, run / name, step)
    (run / "train_results.json").write_text('{"steps": 40}')
    (run / "eval_results").mkdir()
    interval = {"mean": 0.9, "low": 0.4, "high": 0.6, "num_problems": 90}
    document = {"summary": {"accuracy": interval, "greedy_accuracy": None, "is_judged": True}}
    for step in (0, 20, 40):
        (run / "eval_results" / f"eval_step_{step}.json").write_text(json.dumps(document))
    _, _, notes = opened(config_in(tmp_path, resume_from_checkpoint="checkpoint-20"))
    assert BestModel(run, make_policy(), enabled=True).step is None  # it was 40
    left = {path.relative_to(run).as_posix() for path in (*run.iterdir(), *run.glob("eval_results/*"))}
    aside = {"checkpoint-40", "best_model", "final_model", "train_results.json"}
    aside.add("eval_results/eval_step_40.json")
    assert {f"{name}.aside" for name in aside} <= left and not aside & left
    assert {"checkpoint-20", "eval_results/eval_step_20.json"} <= left
    assert sum("newer than the checkpoint to resume from" in note for note in notes) == 5


def test_without_an_evaluation_nothing_is_best() -> None:
    keys = {"datasets": {"gcd": {}}, "load_best_model_at_end": True}
    with pytest.raises(UserError, match="set eval_num_samples: 100"):
        build({**keys, "eval_num_samples": 0})
    config = build({**keys, "fixed_eval_steps": 0, "max_steps": 4})
    assert any("load_best_model_at_end" in note for note in notes_of(config))
    config = build({**keys, "fixed_eval_steps": 2, "max_steps": 4})
    assert not any("load_best_model_at_end" in note for note in notes_of(config))


def notes_of(config: Config) -> list[str]:
    return ineffective_settings(config, make_plan(config, num_problems=100))
