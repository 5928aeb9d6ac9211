"""8-bit copies of the MLPs' matrices: `rollout_quantization: fp8`, for rollouts only.

A matrix has one scale and every row of activations has one, found where the row is made
(kernels/pointwise.py). The product leaves the rows' scales to the kernel that reads it: torch's product with
a scale for every row was slower than the one in 16 bits (docs/log.md). The copies are made anew after each
update, adapters merged in; the weights that train are never touched. Attention, its products, the head and
the prompts' prefill keep their precision: there is little to gain.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from whetstone.engines.native.fused_linear import Joined

LARGEST = 448.0  # of float8_e4m3fn
SMALLEST_SCALE = 1e-12  # of rows that are all 0
SIDE = 16  # the product wants sides that are multiples of it
ROWS_AT_ONCE = 4096  # of a matrix that is rounded, so that its float32 copy stays small


class Scaled(NamedTuple):
    """[n, K] values, in 8 bits or a product of such, to be multiplied by scale [n]."""

    values: Tensor
    scale: Tensor


class EightBits:
    """A joined matrix, multiplied in 8 bits. It has the memory of half the matrix, and keeps it: captured
    graphs read it there.
    """

    def __init__(self, joined: Joined):
        assert can_round(joined)
        self.joined = joined
        device = joined.weight.device
        self.weight = torch.empty(joined.weight.shape, dtype=torch.float8_e4m3fn, device=device)
        self.scale, self.one = torch.ones((), device=device), torch.ones((), device=device)
        self.refresh()

    def __call__(self, x: Scaled) -> Scaled:
        product = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            x.values,
            self.weight.t(),
            scale_a=self.one,
            scale_b=self.scale,
            out_dtype=self.joined.weight.dtype,
            use_fast_accum=True,
        )
        return Scaled(product, x.scale)

    @torch.no_grad()
    def refresh(self) -> None:
        """Round what the joined matrix is now (refresh that one first)."""
        largest = torch.stack([part.abs().amax() for _, part in self._pieces()]).amax()
        self.scale.copy_((largest / LARGEST).clamp_min(SMALLEST_SCALE))
        for rows, part in self._pieces():
            self.weight[rows] = (part / self.scale).clamp_(-LARGEST, LARGEST).to(self.weight.dtype)

    def _pieces(self) -> Iterator[tuple[slice, Tensor]]:
        adapter = self.joined.adapter
        for begin in range(0, len(self.weight), ROWS_AT_ONCE):
            rows = slice(begin, begin + ROWS_AT_ONCE)
            part = self.joined.weight[rows].float()
            if adapter is not None:
                part += adapter.up[:, rows].t().float() @ adapter.down.float()
            yield rows, part


def round_rows(x: Tensor) -> Scaled:
    """What the kernels do, in plain torch."""
    scale = (x.abs().amax(1).float() / LARGEST).clamp_min(SMALLEST_SCALE)
    values = (x.float() / scale[:, None]).clamp(-LARGEST, LARGEST)
    return Scaled(values.to(torch.float8_e4m3fn), scale)


def can_round(joined: Joined) -> bool:
    return joined.bias is None and all(side % SIDE == 0 for side in joined.weight.shape)
