"""What the FP8 kernels do, in plain torch."""

import torch
from torch import Tensor

from whetstone.engines.native.fp8 import FP8_MAX, MIN_SCALE, ScaledTensor


def quantize_rows(x: Tensor) -> ScaledTensor:
    scale = (x.abs().amax(1).float() / FP8_MAX).clamp_min(MIN_SCALE)
    values = (x.float() / scale[:, None]).clamp(-FP8_MAX, FP8_MAX)
    return ScaledTensor(values.to(torch.float8_e4m3fn), scale)
