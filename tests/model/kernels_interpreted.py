"""Run by tests/support/kernels.py in a process of its own with Triton's interpreter: the update's
kernels, on the CPU, against plain torch in float64.
"""

import torch

from tests.support import lora, packed
from tests.support import triton_interpreter as interpreter  # noqa: F401
from whetstone.model import attention_kernels, attention_tiles, gated_lora, lora_products, tiled_attention
from whetstone.model.flash import Copies, FlashPlan
from whetstone.model.fused_head import Head, fused_statistics
from whetstone.model.kernels import sum_copies
from whetstone.model.lora_kernels import gated_backward, gated_forward, with_inner
from whetstone.types import Segment


def head_with(softcap=None, bias=False, entropy=True, rows=3, frozen=False, width=701) -> None:
    """Values and gradients of the fused head, a few rows at a time, against autograd in float64."""
    torch.manual_seed(0)
    n, hidden_size, temperature = 8, 24, 0.7
    hidden, weight = torch.randn(n, hidden_size) * 2, torch.randn(width, hidden_size)
    targets = torch.randint(0, width, (n,))
    targets[0], targets[1] = 0, width - 1
    pull = torch.randn(n), torch.randn(n)
    b = torch.randn(width) if bias else None

    def run(dtype, fused):
        h = hidden.detach().clone().to(dtype).requires_grad_()
        w = weight.detach().clone().to(dtype).requires_grad_(not frozen)
        c = None if b is None else b.detach().clone().to(dtype).requires_grad_(not frozen)
        if fused:
            head = Head(w, c, softcap, 1 / temperature)
            logprobs, ent = fused_statistics(h, targets, head, rows, needs_entropy_gradient=entropy)
            has_short_path = type(logprobs.grad_fn).__name__ == "FrozenHeadBackward"
            assert has_short_path == (frozen and not entropy)
        else:
            logits = torch.nn.functional.linear(h, w, c)
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            every = (logits / temperature).log_softmax(-1)
            logprobs = every.gather(1, targets[:, None])[:, 0]
            ent = -(every.exp() * every).sum(-1)
        total = (logprobs * pull[0]).sum() + ((ent * pull[1]).sum() if entropy else 0.0)
        total.backward()
        return [logprobs, ent, *(leaf.grad for leaf in (h, w, c) if leaf is not None and leaf.requires_grad)]

    for ours, exact in zip(run(torch.float32, True), run(torch.float64, False), strict=True):
        error = ((ours.double() - exact).norm() / exact.norm()).item()
        assert error < 1e-5, (softcap, bias, entropy, error)


def head_without_rows() -> None:
    weight = torch.randn(11, 4, requires_grad=True)
    logprobs, _ = fused_statistics(
        torch.zeros(0, 4, requires_grad=True),
        torch.zeros(0).long(),
        Head(weight, None, None, 1.0),
        2,
        needs_entropy_gradient=False,
    )
    logprobs.sum().backward()
    assert weight.grad is not None and not weight.grad.any()


def shared_keys() -> None:
    """Gradients of copied keys add up as autograd adds them."""
    segments = [
        Segment(0, 3),
        Segment(3, 4, ((0, 3),)),
        Segment(7, 2, ((0, 3),)),
        Segment(9, 5),
        Segment(14, 1, ((9, 5),)),
    ]
    plan = FlashPlan(segments, torch.device("cpu"))
    copies = plan.copies
    assert isinstance(copies, Copies)
    assert copies.index.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 7, 8, 9, 10, 11, 12, 13,
                                     9, 10, 11, 12, 13, 14]  # fmt: skip
    assert plan.query_bounds.tolist() == [0, 3, 7, 9, 14, 15]
    assert plan.key_bounds.tolist() == [0, 3, 10, 15, 20, 26] and (plan.max_query, plan.max_key) == (5, 7)
    keys = torch.randn(15, 2, 8, requires_grad=True)
    pull = torch.randn(26, 2, 8)
    (keys[copies.index] * pull).sum().backward()
    assert torch.allclose(sum_copies(pull, copies.bounds, copies.order), keys.grad, atol=1e-6)


def gated(width: int, rank: int, num_tokens: int) -> None:
    """The backward pass of a gated MLP's middle, against autograd in float64; the inner parts are slices."""
    torch.manual_seed(0)
    gate_up = torch.randn(num_tokens, 2 * width)
    gradient, down = torch.randn(num_tokens, width), torch.randn(num_tokens, rank)
    inner = torch.randn(num_tokens, 5 + 2 * rank)[:, 5:]
    expected = lora.gated_gradients(gate_up, gradient, inner, down)
    for results in (
        gated_backward(gate_up, gradient, inner, down),
        gated_lora.gated_backward(gate_up, gradient, inner, down),
    ):
        for result, right in zip(results, expected, strict=True):
            torch.testing.assert_close(result.double(), right, rtol=1e-4, atol=1e-4)
            assert result.is_contiguous()


def inner(width: int, rank: int, num_tokens: int) -> None:
    """x beside scale A x, and the same of silu(gate) * up, against float64."""
    torch.manual_seed(0)
    a = torch.randn(rank, width)
    gate_up = torch.randn(num_tokens, 2 * width) * 20
    x = gate_up[:, :width]
    hidden = lora.gated(gate_up)
    for values, parts in (
        (x, with_inner(x, a, 0.3)),
        (x, lora_products.with_inner(x, a, 0.3)),
        (hidden, gated_forward(gate_up, a, 0.3)),
        (hidden, gated_lora.gated_forward(gate_up, a, 0.3)),
    ):
        for result, right in zip(
            parts.split([width, rank], dim=1), lora.x_and_inner(values, a, 0.3), strict=True
        ):
            torch.testing.assert_close(result.double(), right, rtol=1e-4, atol=1e-3)


def tiles(segments: list[Segment], heads: int, kv_heads: int, size: int, max_rows: int) -> None:
    """Attention of packed segments and its gradients, in tiles of `size`, against float64."""
    torch.manual_seed(0)
    width = 16
    num_tokens = sum(segment.length for segment in segments)
    # Keys and values as a layer has them: slices of a wider tensor.
    query = torch.randn(num_tokens, heads, width)
    key, value = torch.randn(num_tokens, 2 * kv_heads, width).split(kv_heads, dim=1)
    pull = torch.randn(1, num_tokens, heads, width)
    expected = packed.gradients(query, key, value, pull, segments, 0.3)
    sizes = {"ROWS": size, "KEYS": size}
    attention_tiles.QUERY_TILE.update(sizes)
    attention_tiles.KEY_TILE.update(sizes)
    attention_tiles.MAX_ROWS = max_rows
    plan = tiled_attention.TilePlan(segments, heads // kv_heads, width, torch.device("cpu"))
    query_tiles, items, sums = plan.tables
    out, lse = attention_kernels.forward(query, key, value, query_tiles, plan.num_pieces, 0.3)
    grads = attention_kernels.backward(
        pull[0], query, key, value, out, lse, query_tiles, items, sums, plan.num_pieces, plan.num_parts, 0.3
    )
    for result, right in zip((out, *grads), expected, strict=True):
        assert result.shape == right.shape
        assert (result.double() - right).norm() < 1e-6 * right.norm()


CASES = {
    "tiles of shared prompts": lambda: tiles(packed.SHARED, 6, 2, 16, 4096),
    "tiles of branches, keys in parts": lambda: tiles(packed.BRANCHES, 3, 1, 16, 40),
    "tiles of one head": lambda: tiles(packed.BRANCHES, 2, 2, 32, 4096),
    "tiles of one segment": lambda: tiles([Segment(0, 50)], 2, 2, 16, 4096),
    "a tile of two tokens": lambda: tiles([Segment(0, 2)], 4, 2, 16, 4096),
    "inner": lambda: inner(70, 32, 100),
    "inner, another rank": lambda: inner(128, 5, 64),
    "gated MLP": lambda: gated(70, 16, 1100),
    "gated MLP, another rank": lambda: gated(128, 5, 64),
    "head": head_with,
    "head with a softcap": lambda: head_with(softcap=3.0, rows=100),
    "head with a bias": lambda: head_with(bias=True, rows=8),
    "frozen head without entropy": lambda: head_with(entropy=False, frozen=True),
    "frozen head with a softcap and a bias": lambda: head_with(
        softcap=3.0, bias=True, entropy=False, frozen=True
    ),
    "frozen head with entropy": lambda: head_with(frozen=True),
    "head of many columns": lambda: head_with(width=5000),
    "head without rows": head_without_rows,
    "shared keys": shared_keys,
}
