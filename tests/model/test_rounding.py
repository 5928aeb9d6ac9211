"""Stochastic rounding: right on average, exact where nothing is to be rounded."""

import pytest
import torch

from tests.conftest import make_policy
from whetstone.model.reference import Reference
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


@pytest.mark.parametrize("alpha", [0.4, 0.1, 0.01])
def test_a_moving_reference_in_bf16_moves_by_its_share(alpha: float) -> None:
    """Weights that differ by one to three steps of the grid: to the nearest, none would move at 0.1."""
    policy = make_policy("qwen2", hidden_size=128)
    policy.model.bfloat16()
    reference = Reference.from_policy(policy, policy, moving=True)
    assert reference.weights is not None
    first = [weight.double() for weight in reference.weights]
    torch.manual_seed(0)
    for parameter in policy.parameters():
        steps = torch.randint(1, 4, parameter.shape, dtype=torch.int16)
        parameter.data = (parameter.data.view(torch.int16) + steps).view(torch.bfloat16)
    for update in range(20):
        reference.ema_update(alpha, seed=update)
    moved = total = 0.0
    for weight, parameter, before in zip(reference.weights, policy.parameters(), first, strict=True):
        way = parameter.detach().double() - before
        moved += ((weight.double() - before) * way).sum().item()
        total += way.square().sum().item()
    assert moved / total == pytest.approx(1 - (1 - alpha) ** 20, abs=0.01)
