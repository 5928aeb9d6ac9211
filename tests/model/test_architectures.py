"""Every architecture of docs/models.md: gradient against float64, engine against generate, and its path."""

import logging
from pathlib import Path

import pytest

from tests.support.models import MODELS, examine, tiny_policy
from whetstone.errors import UserError
from whetstone.model.sharded import _packed
from whetstone.model.size import unsampled_part

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.parametrize("model_type", MODELS)
def test_gradient_and_engine_by_architecture(model_type):
    result = examine(model_type)
    assert result.gradient_error < 1e-5
    assert result.tokens_equal
    assert result.generate_difference < 1e-5
    assert result.trainer_difference < 1e-5
    assert result.half_gradient_error < 0.15
    assert result.half_difference < 5e-3
    assert result.half_engine == result.engine  # a misread layer is found in bf16 as well
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    [row] = [row for row in rows if row.startswith(result.path(model_type))]
    assert (unsampled_part(tiny_policy(model_type).config) is None) == (result.engine != "generate")
    largest, mean = (float(cell) for cell in row.split("|")[-3:-1])
    assert largest < 1e-5 and mean < 5e-3


def test_the_page_names_no_other_model():
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(MODELS)


@pytest.mark.parametrize("model_type", ["lfm2", "falcon_h1"])
def test_leaks_between_sequences_are_found_in_bf16(model_type, monkeypatch, caplog):
    """Their error over all tokens is less than bf16 rounds."""
    monkeypatch.setattr("whetstone.model.policy.CACHED_KINDS", {"full_attention", "conv", "hybrid"})
    policy = tiny_policy(model_type)
    policy.model.bfloat16()
    policy.is_packed = True
    with caplog.at_level(logging.WARNING):
        policy.verify()
    assert not policy.is_packed
    assert "mixes sequences" in caplog.text


def test_padded_models_need_a_single_process():
    assert _packed(tiny_policy("llama")).is_packed
    with pytest.raises(UserError, match="single process"):
        _packed(tiny_policy("lfm2"))
