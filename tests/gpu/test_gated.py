"""The first half of an MLP that is written in CUDA, on a real GPU, beside float64 and beside the library."""

import pytest
import torch

from tests.gpu.replays import check_replays
from tests.hopper.gated_on_cpu import check, joined
from whetstone.engines.native.kernels.hopper import gated as hopper_gated
from whetstone.engines.native.kernels.hopper import tiles
from whetstone.engines.native.kernels.pointwise import add_norm, gated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != tiles.CAPABILITY,
        reason="needs a Hopper GPU",
    ),
]


def run(x, both, *, gelu=False):
    both.weight = both.weight.cuda()
    multiply = hopper_gated.try_gate_up(x.cuda(), both, gelu=gelu)
    assert multiply is not None
    return multiply(x.cuda()).cpu()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "depth", "width"),
    [
        (1, 896, 4864),
        (30, 1536, 8960),
        (65, 896, 4864),
        (96, 1536, 8960),
        (128, 1536, 8960),
        (200, 1536, 8960),
        (256, 2048, 11008),
        (1000, 1536, 8960),
        (600, 72, 100),
    ],
)
def test_agrees_with_float64(rows, depth, width, dtype):
    check(rows, depth, width, dtype, False, run)


def test_gelu():
    check(192, 640, 1000, torch.bfloat16, True, lambda x, both: run(x, both, gelu=True))


def test_it_waits_for_the_norm_that_lets_it_begin():
    """Over many layers: what a norm writes is read after it was written."""
    torch.manual_seed(0)
    hidden, width, layers = 1024, 2816, 24
    weights = [joined((torch.randn(2 * width, hidden, device="cuda") / 32).bfloat16()) for _ in range(layers)]
    downs = [(torch.randn(hidden, width, device="cuda") / 50).bfloat16() for _ in range(layers)]
    norm = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)

    def forward(own: bool, residual: torch.Tensor) -> torch.Tensor:
        x = None
        for both, down in zip(weights, downs, strict=True):
            multiply = hopper_gated.try_gate_up(residual, both, gelu=False) if own else None
            normed = add_norm(x, residual, norm, None, (1e-6, 0.0))
            between = multiply(normed) if multiply is not None else gated(both(normed), gelu=False)
            x = between @ down.t()
        return residual

    check_replays(lambda residual: forward(True, residual), lambda residual: forward(False, residual))


def test_what_it_leaves_to_the_library():
    both = joined(torch.zeros(2 * 64, 128, device="cuda", dtype=torch.bfloat16))
    rows = torch.zeros(128, 128, device="cuda", dtype=torch.bfloat16)
    assert hopper_gated.try_gate_up(rows, both, gelu=False) is not None
    assert hopper_gated.try_gate_up(rows.repeat(10, 1), both, gelu=False) is None
    assert hopper_gated.try_gate_up(rows.float(), both, gelu=False) is None
    both.bias = torch.zeros(2 * 64, device="cuda")
    assert hopper_gated.try_gate_up(rows, both, gelu=False) is None
