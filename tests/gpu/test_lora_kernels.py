"""The kernels of LoRA on a real GPU, beside float64."""

import copy

import pytest
import torch

from tests.support import lora
from tests.support.gpu import on_gpu
from tests.support.update import PARTS_OF_A_LAYER, shares_kept, with_small_adapter
from whetstone.model.fused_lora import fuse_lora
from whetstone.model.gated_lora import gated_backward, gated_forward
from whetstone.model.lora_products import with_inner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
SHAPES = [
    (20000, 1536, 16),
    (1000, 1536, 64),
    (5000, 8960, 16),
    (77, 96, 5),
    (300, 200, 64),
]  # rows, width, rank
BOUNDS = {torch.bfloat16: 8e-3, torch.float32: 1e-5}  # of the norm


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def check(results, expected, dtype: torch.dtype) -> None:
    for result, right in zip(results, expected, strict=True):
        assert result.dtype == dtype and result.shape == right.shape
        assert (result.double() - right).norm() < BOUNDS[dtype] * right.norm()


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize(("rows", "width", "rank"), SHAPES)
def test_x_beside_a_x(rows: int, width: int, rank: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, a = numbers(rows, width, dtype=dtype), numbers(3 * rank, width, dtype=dtype)
    check(with_inner(x, a, 0.3).split([width, 3 * rank], dim=1), lora.x_and_inner(x, a, 0.3), dtype)


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize(("rows", "width", "rank"), SHAPES)
def test_a_gated_mlp_in_both_directions(rows: int, width: int, rank: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up, a = numbers(rows, 2 * width, dtype=dtype), numbers(rank, width, dtype=dtype)
    both = gated_forward(gate_up, a, 0.3)
    check(both.split([width, rank], dim=1), lora.x_and_inner(lora.gated(gate_up), a, 0.3), dtype)

    gradient, down = numbers(rows, width, dtype=dtype), numbers(rows, rank, dtype=dtype)
    inner = numbers(rows, 7 + 2 * rank, dtype=dtype)[:, 7:]  # a slice, as it is in the layer
    expected = lora.gated_gradients(gate_up, gradient, inner, down)
    check(gated_backward(gate_up, gradient, inner, down), expected, dtype)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("is_fused", [False, True])
def test_a_small_update_is_not_rounded_away(is_fused: bool, is_compiled: bool) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    policy = with_small_adapter(on_gpu("qwen2", torch.bfloat16, **shape))
    [layer], exact = policy.layers, copy.deepcopy(policy.layers[0]).double()
    if is_fused:
        fuse_lora(policy.layers)
    if is_compiled:
        for name in PARTS_OF_A_LAYER:
            layer.get_submodule(name).compile(dynamic=True)
    shares = shares_kept(layer, exact)
    assert all(abs(share - 1) < 0.2 for share in shares.values()), shares
