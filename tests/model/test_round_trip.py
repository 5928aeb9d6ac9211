"""Every architecture of docs/models.md, end to end: sampled, trained by one step, written and read back."""

import pytest
import torch

from tests.support.models import MODELS, write_tiny
from tests.support.runs import rows, run, weights
from whetstone.config.sections import ModelConfig
from whetstone.model.policy import load_policy

# Buffers, sizes that differ between layers, fused experts, recurrences and convolutions; the others are slow.
QUICK = ("llama", "gemma4_text", "deepseek_v3", "glm4_moe", "apertus", "qwen3_moe", "qwen3_5_text", "lfm2")


@pytest.mark.parametrize(
    "model_type", [pytest.param(m, marks=() if m in QUICK else pytest.mark.slow) for m in MODELS]
)
def test_a_trained_model_is_read_back_with_all_its_tensors(tmp_path, model_type):
    buffers = write_tiny(model_type, tmp_path / "model")
    assert bool(buffers) == (model_type in ("deepseek_v3", "glm4_moe", "apertus", "gemma4_text"))
    run(
        tmp_path,
        model_name_or_path=tmp_path / "model",
        max_steps=1,
        num_generations=2,
        max_completion_length=6,
        entropy_coef=0.1,  # a gradient though all rewards are equal
        skip_zero_advantages=False,
        eval_num_samples=0,
        save_strategy="no",
    )
    [row] = rows(tmp_path, "train")
    assert row["sampling/sampling_logp_difference/mean"] < 1e-4
    assert row["grad_norm"] > 0
    before, after = weights(tmp_path / "model"), weights(tmp_path / "run" / "final_model")
    assert before.keys() == after.keys()
    assert all(before[name].dtype == after[name].dtype for name in before)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and not changed & buffers
    again = load_policy(ModelConfig(model_name_or_path=str(tmp_path / "run" / "final_model"))).lm.state_dict()
    assert buffers <= again.keys()
    assert all(torch.equal(again[name], after[name]) for name in again.keys() & after.keys())
