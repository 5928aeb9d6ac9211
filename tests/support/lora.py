"""The arithmetic of LoRA's kernels in float64."""

import torch
import torch.nn.functional as F
from torch import Tensor


def x_and_inner(x: Tensor, a: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """x, and scale A x."""
    return x.double(), scale * x.double() @ a.double().T


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of both side by side."""
    gate, up = gate_up.double().chunk(2, dim=1)
    return F.silu(gate) * up


def gated_gradients(gate_up: Tensor, gradient: Tensor, inner: Tensor, down: Tensor) -> tuple[Tensor, ...]:
    """By autograd: of gate and up, of the B of either, and of down's A."""
    leaf = gate_up.double().requires_grad_()
    hidden = gated(leaf)
    [both] = torch.autograd.grad(hidden, leaf, gradient.double())
    b_gradients = [g.T @ part for g, part in zip(both.chunk(2, 1), inner.double().chunk(2, 1), strict=True)]
    return both, *b_gradients, down.double().T @ hidden.detach()
