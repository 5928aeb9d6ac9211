"""The reference of the KL penalty in whole runs."""

import pytest
import torch

from tests.support.runs import rows, run
from whetstone.config.sections import ModelConfig
from whetstone.model.policy import load_policy
from whetstone.model.sharded import model_writer

LORA = {"use_peft": True, "lora_r": 4}


def test_the_base_of_a_run_from_an_adapter_is_that_adapter(tmp_path):
    policy = load_policy(ModelConfig(**LORA))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():  # far from the model without it
            parameter.add_(0.05 * torch.randn_like(parameter))
    (tmp_path / "adapter").mkdir()
    model_writer(policy)(tmp_path / "adapter")
    settings = {
        **LORA,
        "model_name_or_path": tmp_path / "adapter",
        "beta": 0.1,
        "kl_in": "loss",
        "skip_zero_advantages": False,
        "entropy_coef": 0.1,
        "max_completion_length": 8,
        "eval_num_samples": 0,
        "save_steps": 1,
        "learning_rate": 1e-5,
    }
    run(tmp_path, max_steps=2, **settings)
    first, second = (row["kl"] for row in rows(tmp_path, "train"))
    assert first == pytest.approx(0, abs=1e-6) and 1e-6 < second < 0.1
    again = tmp_path / "again"
    run(again, max_steps=2, resume_from_checkpoint=tmp_path / "run" / "checkpoint-1", **settings)
    assert rows(again, "train")[-1]["kl"] == second
