"""Every architecture of docs/models.md, end to end: sampled, trained by one step, written and read back."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.models import MODELS, WRAPPERS, write_tiny
from tests.support.runs import rows, run, weights
from whetstone.api import Run
from whetstone.config.sections import ModelConfig
from whetstone.model.policy import load_policy

# Buffers, sizes that differ between layers, fused experts, recurrences and convolutions; the others are slow.
QUICK = ("llama", "gemma4_text", "deepseek_v3", "glm4_moe", "apertus", "qwen3_moe", "qwen3_5_text", "lfm2")


def train(tmp_path, **changes):
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
        **changes,
    )


@pytest.mark.parametrize(
    "model_type", [pytest.param(m, marks=() if m in QUICK else pytest.mark.slow) for m in MODELS]
)
def test_a_trained_model_is_read_back_with_all_its_tensors(tmp_path, model_type):
    buffers = write_tiny(model_type, tmp_path / "model")
    assert bool(buffers) == (model_type in ("deepseek_v3", "glm4_moe", "apertus", "gemma4_text"))
    train(tmp_path)
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


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(
    "model_type", [pytest.param(m, marks=() if m == "qwen3_5" else pytest.mark.slow) for m in WRAPPERS]
)
def test_a_text_model_keeps_the_vision_tower_around_it(tmp_path, model_type, lora):
    write_tiny(model_type, tmp_path / "model")
    train(tmp_path, **({"use_peft": True, "lora_r": 2, "learning_rate": 0.01} if lora else {}))
    [row] = rows(tmp_path, "train")
    assert row["sampling/sampling_logp_difference/mean"] < 1e-4 and row["grad_norm"] > 0
    before, trained = weights(tmp_path / "model"), weights(tmp_path / "run" / "final_model")
    if lora:
        assert trained and not any("vision" in name or "visual" in name for name in trained)
        Run(tmp_path / "run").export(tmp_path / "export")
    folder = tmp_path / "export" if lora else tmp_path / "run" / "final_model"
    after = weights(folder)
    assert before.keys() == after.keys()
    tower = {name for name in before if "vision" in name or "visual" in name or "projector" in name}
    assert len(tower) > 9
    assert {name for name in before if torch.equal(before[name], after[name])} >= tower
    assert any(not torch.equal(before[name], after[name]) for name in before.keys() - tower)
    configs = [json.loads((path / "config.json").read_text()) for path in (tmp_path / "model", folder)]
    assert configs[0]["architectures"] == configs[1]["architectures"] == [WRAPPERS[model_type][0]]
    assert (folder / "preprocessor_config.json").read_text() == '{"image_processor_type": "any"}'
    policy = load_policy(ModelConfig(model_name_or_path=str(folder)))
    assert len(policy.layers) == policy.config.num_hidden_layers != 3  # not those of the tower


def test_tensors_without_a_place_are_named(tmp_path, caplog):
    write_tiny("qwen3_5_text", tmp_path)
    path = tmp_path / "model.safetensors"
    extra = {"mtp.fc.weight": torch.ones(2, 2), "value_head.weight": torch.ones(2)}
    save_file({**load_file(path), **extra}, path, metadata={"format": "pt"})
    load_policy(ModelConfig(model_name_or_path=str(tmp_path)))
    [message] = [text for text in caplog.messages if "no place" in text]
    assert "2 tensors" in message and "mtp.fc.weight first" in message
