"""FP8 copies of the MLP weights for decoding: `rollout_quantization: fp8`.

A matrix has one scale, a row of activations has one of its own, computed where the row is written
(kernels/pointwise.py). The row scales are applied by the next kernel: `_scaled_mm` with row scales was slower
than bf16 (docs/log.md). The copies are refreshed after each update, with LoRA merged in. Attention, the head
and prefill keep their precision.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from whetstone.engines.native.fused_linear import FusedLinear

FP8_MAX = 448.0  # of float8_e4m3fn
MIN_SCALE = 1e-12  # of rows that are all 0
ALIGNMENT = 16  # of both sides of a matrix, for _scaled_mm
CHUNK_ROWS = 4096  # converted at a time, so that the float32 copy stays small


class ScaledTensor(NamedTuple):
    """[n, K] values (FP8, or a product of FP8 values) to be multiplied by scale [n]."""

    values: Tensor
    scale: Tensor


class Fp8Linear:
    """A fused linear layer in FP8. Its memory is allocated once, since CUDA graphs read it."""

    def __init__(self, linear: FusedLinear):
        assert supports_fp8(linear)
        self.linear = linear
        device = linear.weight.device
        self.weight = torch.empty(linear.weight.shape, dtype=torch.float8_e4m3fn, device=device)
        self.scale, self.unit_scale = torch.ones((), device=device), torch.ones((), device=device)
        self.refresh()

    def __call__(self, x: ScaledTensor) -> ScaledTensor:
        product = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            x.values,
            self.weight.t(),
            scale_a=self.unit_scale,
            scale_b=self.scale,
            out_dtype=self.linear.weight.dtype,
            use_fast_accum=True,
        )
        return ScaledTensor(product, x.scale)

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantize the current weights (refresh the fused layer first)."""
        largest = torch.stack([chunk.abs().amax() for _, chunk in self._chunks()]).amax()
        self.scale.copy_((largest / FP8_MAX).clamp_min(MIN_SCALE))
        for rows, chunk in self._chunks():
            self.weight[rows] = (chunk / self.scale).clamp_(-FP8_MAX, FP8_MAX).to(self.weight.dtype)

    def _chunks(self) -> Iterator[tuple[slice, Tensor]]:
        adapter = self.linear.adapter
        for start in range(0, len(self.weight), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            chunk = self.linear.weight[rows].float()
            if adapter is not None:
                chunk += adapter.up[:, rows].t().float() @ adapter.down.float()
            yield rows, chunk


def supports_fp8(linear: FusedLinear) -> bool:
    return linear.bias is None and all(side % ALIGNMENT == 0 for side in linear.weight.shape)
