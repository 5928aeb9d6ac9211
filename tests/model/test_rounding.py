"""Stochastic rounding: right on average, exact where nothing is to be rounded."""

import pytest
import torch

from whetstone.model.rounding import stochastic_round

HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])


@HALF
@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.9])
def test_the_chance_to_round_up_is_the_distance(dtype: torch.dtype, share: float) -> None:
    step = torch.finfo(dtype).eps
    rounded = stochastic_round(torch.full((400, 500), -(1 + share * step)), dtype).double()
    assert set(rounded.unique().tolist()) == {-1.0, -1.0 - step}
    assert (-1 - rounded.mean()).item() / step == pytest.approx(share, abs=0.005)  # 4 deviations


@HALF
def test_what_it_can_represent_does_not_change(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = torch.randn(300, 300).to(dtype)
    assert torch.equal(stochastic_round(values.float(), dtype), values)
    assert torch.equal(stochastic_round(values, dtype), values)


@HALF
def test_numbers_that_are_not_finite_stay_so(dtype: torch.dtype) -> None:
    largest = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # NaNs of a GPU
    rounded = stochastic_round(torch.tensor([torch.nan, torch.inf, -torch.inf]), dtype)
    assert rounded[0].isnan() and rounded[1:].tolist() == [torch.inf, -torch.inf]
    assert stochastic_round(largest, dtype).isnan().all()


def test_it_is_the_same_each_time_and_at_most_a_step_off() -> None:
    torch.manual_seed(0)
    values = torch.randn(100, 100).t()  # not contiguous
    first, second = (stochastic_round(values, torch.bfloat16) for _ in range(2))
    assert torch.equal(first, second)
    assert ((first.float() - values).abs() <= values.abs() * torch.finfo(torch.bfloat16).eps).all()
    assert stochastic_round(values, torch.float32) is values
