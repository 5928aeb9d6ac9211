"""4-bit weights beneath an adapter (QLoRA): `load_in_4bit: true`.

NF4 as bitsandbytes has it, to the bit (tests/model/test_nf4.py): 64 weights of a row share a scale, two codes
are a byte. Trainer and engine multiply by the same matrix. It is dequantized for each product and not kept:
the backward pass makes it again. Our own, since the engine's CUDA graphs and the compiled layers need it as
one operator with fixed addresses.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whetstone.model.lora_products import adapted_product

BLOCK = 64  # weights that share a scale
# Quantiles of the normal distribution, scaled to [-1, 1]: arXiv 2305.14314, appendix E.
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)  # fmt: skip
ROUTERS = ("gate", "router")  # names of layers that choose experts: small, and rounding changes the choice


class Nf4Linear(nn.Linear):
    """A frozen linear layer in 4 bits."""

    def __init__(self, linear: nn.Linear, device: torch.device):
        nn.Module.__init__(self)  # nn.Linear's own would allocate the matrix
        self.in_features, self.out_features = linear.in_features, linear.out_features
        codes, scales = quantize(linear.weight.detach().to(device))
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.dtype = linear.weight.dtype
        bias = linear.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach().to(device), requires_grad=False)

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The matrix, dequantized anew."""
        return dequantize(self.codes, self.scales, self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        return _Product.apply(input, self.codes, self.scales, self.bias)

    def adapted(self, x: Tensor, inner: Tensor, up: Tensor) -> Tensor:
        """`lora_products.AdaptedProduct`"""
        return _AdaptedProduct.apply(x, inner, self.codes, self.scales, up)


class _Product(torch.autograd.Function):
    """x -> x W^T + b, with W dequantized once more for the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(codes, scales)
        return F.linear(x, dequantize(codes, scales, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        codes, scales = ctx.saved_tensors
        return grad @ dequantize(codes, scales, grad.dtype), None, None, None


class _AdaptedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, inner: Tensor, codes: Tensor, scales: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(inner, codes, scales, up)
        return adapted_product(x, inner, dequantize(codes, scales, x.dtype), up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        [gradient], [inner, codes, scales, up] = gradients, ctx.saved_tensors
        weight = dequantize(codes, scales, gradient.dtype)
        return gradient @ weight, gradient @ up, None, None, gradient.T @ inner


def quantize_model(model: Any, device: torch.device) -> None:
    """Put 4-bit layers on `device` in the place of linear layers, one at a time.

    Embeddings, output matrix, routers, and matrices whose rows do not divide into blocks stay as they are.
    """
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or child is head or name in ROUTERS:
                continue
            if child.in_features % BLOCK == 0:
                setattr(parent, name, Nf4Linear(child, device))


def dequantize_model(model: nn.Module) -> None:
    """Put ordinary layers with the same matrices in the place of 4-bit ones, to merge and save them."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Nf4Linear):
                plain = nn.Linear(child.in_features, child.out_features, bias=False, device="meta")
                plain.weight = nn.Parameter(child.weight, requires_grad=False)
                plain.register_parameter("bias", child.bias)
                setattr(parent, name, plain)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] -> codes [N, K / 2], the first weight of a pair in the upper half, and scales [N, K / 64]."""
    blocks = weight.float().unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(-1)
    levels = level_table(weight.device)
    scaled = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    codes = torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2).to(torch.uint8).flatten(1)
    return codes[:, ::2] << 4 | codes[:, 1::2], scales


@functools.cache
def level_table(device: torch.device) -> Tensor:
    return torch.tensor(LEVELS, device=device)


@torch.library.custom_op("whetstone::dequantize_nf4", mutates_args=())
def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, K] of a dtype: level x scale in float32, rounded once."""
    if codes.is_cuda:
        from whetstone.model.kernels import dequantize_nf4

        return dequantize_nf4(codes, scales, level_table(codes.device), dtype)
    values = level_table(codes.device)[torch.stack([codes >> 4, codes & 15], -1).flatten(1).int()]
    return (values.unflatten(1, (-1, BLOCK)) * scales[..., None]).flatten(1).to(dtype)


@dequantize.register_fake
def _(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(codes.shape[0], 2 * codes.shape[1], dtype=dtype)
