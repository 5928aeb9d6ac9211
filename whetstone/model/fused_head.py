"""Hidden states and the output matrix -> logprob and entropy of chosen tokens, on a GPU.

The logits of some rows at a time, in the model's precision; a kernel reads them once. The backward pass makes
them again (a third more work for the head than keeping them, and no memory), turns them into their own
gradient in place, and multiplies. The logits of all rows never exist. By hand, since autograd would keep
several float32 copies of each chunk and read it a dozen times. logprobs.py decides who comes here.

Where the matrix is frozen (LoRA), the gradient of a logprob is made while the logits are there: it only has
to be multiplied by a number for each row later, and no logits are made twice.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Head(NamedTuple):
    """An output head that is one matrix."""

    weight: Tensor  # [V, H]
    bias: Tensor | None
    softcap: float | None  # logits are bent by softcap * tanh(logits / softcap)
    scale: float  # and multiplied by this, 1 / temperature included


class FusedHead(torch.autograd.Function):
    """apply(hidden [N, H], weight, bias, targets [N], head, rows at a time) -> logprobs, entropy, float32."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, head: Head, rows: int):
        from whetstone.model.kernels import row_statistics

        outs = [torch.empty(len(hidden), dtype=torch.float32, device=hidden.device) for _ in range(3)]
        for part in _parts(len(hidden), rows):
            logits = torch.nn.functional.linear(hidden[part], weight, bias)
            logprobs, entropy, lse = (out[part] for out in outs)
            row_statistics(logits, targets[part], head.scale, head.softcap, (logprobs, entropy, lse))
            del logits  # before the next ones are made
        logprobs, entropy, lse = outs
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, lse)
        ctx.head, ctx.rows = head, rows
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):  # type: ignore[override]
        from whetstone.model.kernels import logits_to_gradient

        hidden, weight, bias, targets, entropy, lse = ctx.saved_tensors
        head: Head = ctx.head
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(lse)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = grad_bias = None
        for part in _parts(len(hidden), ctx.rows):
            logits = torch.nn.functional.linear(hidden[part], weight, bias)
            grads = (grad_logprobs[part], None if grad_entropy is None else grad_entropy[part])
            logits_to_gradient(
                logits, targets[part], lse[part], entropy[part], grads, head.scale, head.softcap
            )
            if grad_hidden is not None:
                torch.mm(logits, weight, out=grad_hidden[part])
            if needs_weight:
                mine = (logits.t(), hidden[part])
                grad_weight = torch.mm(*mine) if grad_weight is None else grad_weight.addmm_(*mine)
            if needs_bias:
                sums = logits.sum(0, dtype=torch.float32)
                grad_bias = sums if grad_bias is None else grad_bias + sums
            del logits
        if needs_weight and grad_weight is None:  # no rows at all: a rank that only takes part
            grad_weight = torch.zeros_like(weight)
        if needs_bias:
            grad_bias = torch.zeros_like(bias) if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


class FrozenHead(torch.autograd.Function):
    """apply(hidden [N, H], targets [N], head, rows at a time) -> logprobs, entropy, float32.

    Neither the matrix nor the entropy gets a gradient.
    """

    @staticmethod
    def forward(ctx, hidden, targets, head: Head, rows: int):
        from whetstone.model.kernels import logits_to_gradient, row_statistics

        outs = [torch.empty(len(hidden), dtype=torch.float32, device=hidden.device) for _ in range(3)]
        unit = torch.ones_like(outs[0])  # the gradient that comes later is a factor
        directions = torch.empty_like(hidden)  # of the gradient of each logprob
        for part in _parts(len(hidden), rows):
            logits = torch.nn.functional.linear(hidden[part], head.weight, head.bias)
            logprobs, entropy, lse = (out[part] for out in outs)
            row_statistics(logits, targets[part], head.scale, head.softcap, (logprobs, entropy, lse))
            logits_to_gradient(
                logits, targets[part], lse, entropy, (unit[part], None), head.scale, head.softcap
            )
            torch.mm(logits, head.weight, out=directions[part])
            del logits
        logprobs, entropy, _ = outs
        ctx.save_for_backward(directions)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, *grads: Tensor):
        grad_logprobs, _ = grads
        [directions] = ctx.saved_tensors
        return (grad_logprobs[:, None] * directions).to(directions.dtype), None, None, None


def _parts(num_rows: int, rows: int) -> Iterator[slice]:
    return (slice(start, start + rows) for start in range(0, num_rows, rows))


def fused_statistics(
    hidden: Tensor, targets: Tensor, head: Head, rows: int, *, needs_entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Logprob of each target and entropy, `rows` of them at a time."""
    is_trained = head.weight.requires_grad or (head.bias is not None and head.bias.requires_grad)
    has_gradient = torch.is_grad_enabled() and hidden.requires_grad
    if has_gradient and not is_trained and not needs_entropy_gradient:
        logprobs, entropy = FrozenHead.apply(hidden, targets, head, rows)
        return logprobs, entropy
    return FusedHead.apply(hidden, head.weight, head.bias, targets, head, rows)  # type: ignore[return-value]
