"""The small products that are written in CUDA, on a real GPU, beside float64."""

import pytest
import torch

from tests.gpu.replays import check_replays
from tests.hopper.linear_on_cpu import check
from whetstone.engines.native.fused_linear import FusedLinear
from whetstone.engines.native.kernels.hopper import linear as hopper_linear
from whetstone.engines.native.kernels.hopper import tiles
from whetstone.engines.native.kernels.hopper.linear import try_linear
from whetstone.engines.native.kernels.pointwise import add_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != tiles.CAPABILITY,
        reason="needs a Hopper GPU",
    ),
]


@pytest.mark.parametrize(
    ("rows", "depth", "width", "dtype", "bias"),
    [
        (1, 896, 1152, torch.bfloat16, True),
        (65, 896, 1152, torch.bfloat16, True),
        (30, 1536, 1536, torch.bfloat16, False),
        (128, 1536, 2048, torch.bfloat16, True),
        (200, 1536, 1536, torch.float16, False),
        (256, 1536, 2048, torch.float16, True),
        (256, 2048, 2560, torch.bfloat16, True),
        (130, 72, 88, torch.bfloat16, False),
    ],
)
def test_agrees_with_float64(rows, depth, width, dtype, bias):
    check(rows, depth, width, dtype, bias=bias, device="cuda")


def test_a_chain_of_kernels_that_begin_early():
    """Over many layers: each reads what the one before it wrote, after it was written."""
    torch.manual_seed(0)
    hidden, layers = 1024, 24

    def made(inner: int, outer: int) -> FusedLinear:
        layer = torch.nn.Linear(inner, outer, device="cuda", dtype=torch.bfloat16)
        return FusedLinear([layer.requires_grad_(False)])

    pairs = [(made(hidden, 1536), made(1536, hidden)) for _ in range(layers)]
    norm = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)

    def forward(multiply, residual: torch.Tensor) -> torch.Tensor:
        x = None
        for wide, narrow in pairs:
            hidden = add_norm(x, residual, norm, None, (1e-6, 0.0))
            x = multiply(multiply(hidden, wide), narrow)
        return residual

    check_replays(
        lambda residual: forward(try_linear, residual),
        lambda residual: forward(lambda x, fused: fused(x), residual),
    )


def test_what_it_leaves_to_the_library(monkeypatch):
    asked = []
    monkeypatch.setattr(hopper_linear, "_run", lambda kernel, tile, x, joined: asked.append(len(x)))
    layer = torch.nn.Linear(128, 64, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    rows = torch.zeros(300, 128, device="cuda", dtype=torch.bfloat16)
    for some in (rows, rows[:100], rows[:100].float(), rows[:100].t().contiguous().t()):
        try_linear(some, FusedLinear([layer.to(some.dtype)]))
    assert asked == [100]
