"""docs/extending.md and examples/extending: the page has the files, and a run uses all of them."""

import math
from pathlib import Path

import pytest
import torch

import whetstone
from examples.extending.loss import reinforce
from scripts.make_extending import PAGE, PAGES, insert_files
from whetstone.algorithm.losses import LossInputs
from whetstone.config import Config

SMALL = {"reward_workers": 1, "prompts_per_step": 2, "num_generations": 2, "eval_num_samples": 2}
SMALL |= {"preflight": "off"}  # the example's engine is slow
ROOT = Path(__file__).resolve().parents[2]


def test_the_page_has_the_files_as_they_are() -> None:
    for folder, path in zip(("extending", "agents"), PAGES, strict=True):
        page = path.read_text()
        assert insert_files(page) == page
        for example in PAGE.parent.glob(f"../examples/{folder}/*.*"):
            assert f"<!-- examples/{folder}/{example.name} -->" in page


def test_the_loss_by_hand() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=torch.tensor([-1.0, -3.0, -0.5 + math.log(2)]),
        advantages=torch.tensor([1.0, 2.0, -1.0]),
        ratio=torch.tensor([1.0, math.e, 0.5]),
        sequence_ids=torch.tensor([0, 0, 1]),
        num_sequences=2,
    )
    outputs = reinforce(inputs, Config().loss)
    outputs.loss.sum().backward()
    assert outputs.loss.tolist() == [1.0, 8.0, -0.25]
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-1.0, -4.0, 0.5]
    assert outputs.clipped.tolist() == [False, True, False]


def test_a_run_with_every_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run = whetstone.train("examples/extending/config.yaml", output_dir=tmp_path, **SMALL)
    steps = [row for row in run.metrics if row["kind"] == "train"]
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert 0 <= row["off_by_one_ratio"] <= 1
        assert math.isclose(row["reward"], row["accuracy"] + row["rewards/is_number/mean"], abs_tol=1e-6)
        assert row["sampling/sampling_logp_difference/mean"] < 1e-5
    assert max(row["rewards/is_number/mean"] for row in steps) > 0
    assert "accuracy/examples/extending/task.py:Remainders" in steps[0]
