"""Attention of packed segments on a real GPU, ours and torch's, beside float64."""

import pytest
import torch

from tests.support import packed
from whetstone.model.flash import FlashPlan
from whetstone.model.tiled_attention import CAPABILITY, TilePlan
from whetstone.types import Segment

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
PROMPT = [Segment(0, 150), *(Segment(150 + 333 * n, 333, ((0, 150),)) for n in range(12))]
SHARED = [
    Segment(0, 400),
    Segment(400, 77, ((0, 400),)),
    Segment(477, 30, ((0, 370),)),  # a prompt that begins as the first one
    Segment(507, 1, ((0, 370), (477, 30))),
    Segment(508, 600, ((0, 370), (477, 30))),
    Segment(1108, 50, ((0, 370), (477, 30), (508, 100))),
    Segment(1158, 9, ((0, 370), (477, 30), (508, 100), (1108, 3))),
]
ALONE = [Segment(0, 2000), Segment(2000, 1), Segment(2001, 129)]


@pytest.mark.parametrize("kind", ["tiles", "flash"])
@pytest.mark.parametrize("segments", [PROMPT, SHARED, ALONE], ids=["prompt", "shared", "alone"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [
        (12, 2, 128, torch.bfloat16),
        (14, 2, 64, torch.bfloat16),
        (9, 3, 64, torch.float16),
        (4, 4, 128, torch.float16),
        (8, 1, 128, torch.bfloat16),
    ],
)
def test_agrees_with_float64(kind, segments, heads, kv_heads, head_dim, dtype) -> None:
    if kind == "tiles" and torch.cuda.get_device_capability() != CAPABILITY:
        pytest.skip("needs a Hopper GPU")
    torch.manual_seed(0)
    num_tokens, device = sum(segment.length for segment in segments), torch.device("cuda")
    query = torch.randn(num_tokens, heads, head_dim, device=device).to(dtype)
    both = torch.randn(num_tokens, 2 * kv_heads, head_dim, device=device).to(dtype)
    key, value = both.split(kv_heads, dim=1)
    pull = torch.randn(1, num_tokens, heads, head_dim, device=device).to(dtype)
    scale = 2 * head_dim**-0.5
    if kind == "tiles":
        plan = TilePlan(segments, heads // kv_heads, head_dim, device)
    else:
        plan = FlashPlan(segments, device)

    def run() -> list[torch.Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        out = plan.attend(*(leaf.transpose(0, 1)[None] for leaf in leaves), scale=scale, window=None)
        return [out[0].detach(), *torch.autograd.grad(out, leaves, pull)]

    results, again = run(), run()
    right = packed.gradients(query, key, value, pull, segments, scale)
    for name, ours, same, exact in zip(("out", "query", "key", "value"), results, again, right, strict=True):
        assert (ours.double() - exact).norm() < 1e-2 * exact.norm(), name
        if kind == "tiles":  # torch's adds gradients of queries in any order
            assert torch.equal(ours, same), f"{name} differs from run to run"
