"""A gated MLP beneath LoRA, down(silu(gate x) * up x), that reads wide tensors once.

Between its products, tensors are several times as wide as x. Layer by layer, a kernel writes silu(gate) * up
and the product with A of down reads it; in the backward pass a kernel writes the gradients of gate and up,
and three thin products read them, or what is as wide. Here one kernel does all of it, in either direction.
The backward one also computes silu(gate) * up again, which needs not be kept.
"""

import functools
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whetstone.model.lora import is_short
from whetstone.model.lora_products import joined, with_inner

FORWARD = "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"
MAX_RANK = 64  # more sums than a kernel has registers for


def is_gated_mlp(module: nn.Module) -> bool:
    """Whether it is such an MLP of LoRA layers without biases, in ranks that the kernels take."""
    members: list[Any] = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(map(is_short, members)) or any(member.base_layer.bias is not None for member in members):
        return False
    same = members[0].scaling == members[1].scaling and members[0].r == members[1].r == members[2].r
    return same and max(members[0].r.values()) <= MAX_RANK and is_silu_mlp(module)


def is_silu_mlp(module: nn.Module) -> bool:
    """Whether its forward pass is the one above, by its source and its activation."""
    activation = type(getattr(module, "act_fn", None)).__name__
    return activation in ("SiLU", "SiLUActivation") and FORWARD in _source(type(module))


@functools.cache
def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return ""


@functools.cache
def gated_class(kind: type) -> type:
    """`kind` with the forward pass in fewer kernels."""

    def forward(self: Any, x: Tensor) -> Tensor:
        layers = [self.gate_proj, self.up_proj, self.down_proj]
        if any(layer.disable_adapters or len(layer.active_adapters) != 1 for layer in layers):
            return kind.forward(self, x)
        return _gated_mlp(layers, x)

    return type(kind.__name__, (kind,), {"forward": forward})


def _gated_mlp(layers: list[Any], x: Tensor) -> Tensor:
    name = layers[0].active_adapters[0]
    gate_a, up_a, down_a = (layer.lora_A[name].weight for layer in layers)
    ups = (layer.lora_B[name].weight for layer in layers)
    weights = (layer.base_layer.weight for layer in layers)
    scales = (layers[0].scaling[name], layers[2].scaling[name])
    rows = x.reshape(-1, x.shape[-1])
    out = _GatedMlp.apply(rows, *scales, torch.cat([gate_a, up_a]), down_a, *weights, *ups)
    return out.view(*x.shape[:-1], -1)


class _GatedMlp(torch.autograd.Function):
    """[T, in] -> [T, out], where only A and B are trained; gate and up have one A, [2 r, in]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, down_scale: float, a: Tensor, *matrices: Tensor) -> Tensor:
        down_a, gate, up, down, gate_b, up_b, down_b = matrices
        both = with_inner(x, a, scale)
        gate_up = F.linear(both, joined((gate, up), (gate_b, up_b)))
        ctx.scales = scale, down_scale
        hidden = gated_forward(gate_up, down_a, down_scale)
        inner = hidden[:, down.shape[1] :].contiguous()
        ctx.save_for_backward(both, gate_up, inner, a, *matrices)
        return F.linear(hidden, torch.cat([down, down_b], dim=1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        [gradient] = gradients
        both, gate_up, inner, a, down_a, gate, up, down, gate_b, up_b, down_b = ctx.saved_tensors
        scale, down_scale = ctx.scales
        sizes = [a.shape[1], len(a)]
        x, gate_up_inner = both.split(sizes, dim=1)
        inner_gradient = (gradient @ down_b) * down_scale
        hidden_gradient = torch.cat([gradient, inner_gradient], dim=1) @ torch.cat([down, down_a])
        gate_up_gradient, gate_b_gradient, up_b_gradient, down_a_gradient = gated_backward(
            gate_up, hidden_gradient, gate_up_inner, inner_gradient
        )
        product = gate_up_gradient @ joined((gate, up), (gate_b, up_b))
        x_gradient, a_gradient = product.split(sizes, dim=1)
        a_gradient = a_gradient * scale
        x_gradient = x_gradient + a_gradient @ a
        frozen = (None, None, None)
        b_gradients = (gate_b_gradient, up_b_gradient, gradient.T @ inner)
        return x_gradient, None, None, a_gradient.T @ x, down_a_gradient, *frozen, *b_gradients


@torch.library.custom_op("whetstone::gated_forward", mutates_args=())
def gated_forward(gate_up: Tensor, a: Tensor, scale: float) -> Tensor:
    """Gate and up side by side [T, 2 I] -> h = silu(gate) * up beside scale A h, [T, I + r].

    In plain torch; on a GPU it is a kernel.
    """
    gate, up = gate_up.chunk(2, dim=1)
    hidden = F.silu(gate) * up
    return torch.cat([hidden, F.linear(hidden, a) * scale], dim=1)


@gated_forward.register_fake
def _(gate_up, a, scale):
    return gate_up.new_empty(gate_up.shape[0], sum(a.shape))


@gated_forward.register_kernel("cuda")
def _(gate_up, a, scale):
    from whetstone.model.lora_kernels import gated_forward as kernel

    return kernel(gate_up, a, scale)


@torch.library.custom_op("whetstone::gated_backward", mutates_args=())
def gated_backward(
    gate_up: Tensor, gradient: Tensor, inner: Tensor, down_inner_gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of gate and up [T, 2 I], of their Bs [I, r] and of down's A [r, I].

    From gate and up side by side [T, 2 I], the gradient of silu(gate) * up [T, I], A x of both [T, 2 r], and
    the gradient of down's A h [T, r]. In plain torch; on a GPU it is a kernel.
    """
    gate, up = gate_up.float().chunk(2, dim=1)
    gradient = gradient.float()
    share = torch.sigmoid(gate)
    gate_gradient = gradient * up * share * (1 + gate * (1 - share))
    up_gradient = gradient * gate * share
    rank = inner.shape[1] // 2
    first, second = inner.float().split([rank, rank], dim=1)
    half = gate_up.dtype
    return (
        torch.cat([gate_gradient, up_gradient], dim=1).to(half),
        (gate_gradient.T @ first).to(half),
        (up_gradient.T @ second).to(half),
        (down_inner_gradient.float().T @ (gate * share * up)).to(half),
    )


@gated_backward.register_fake
def _(gate_up, gradient, inner, down_inner_gradient):
    width, rank = gradient.shape[1], down_inner_gradient.shape[1]
    b = [gate_up.new_empty(width, rank) for _ in range(2)]
    return gate_up.new_empty(gate_up.shape), *b, gate_up.new_empty(rank, width)


@gated_backward.register_kernel("cuda")
def _(gate_up, gradient, inner, down_inner_gradient):
    from whetstone.model.lora_kernels import gated_backward as kernel

    return kernel(gate_up, gradient, inner, down_inner_gradient)
