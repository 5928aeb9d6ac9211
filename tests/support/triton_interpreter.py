"""Triton's interpreter, taught numpy's ways: imported by whatever runs kernels on the CPU."""

import numpy as np
import torch
from triton.runtime import interpreter


class _Whole(type):
    def __instancecheck__(cls, value):
        return isinstance(value, int)

    def __call__(cls, value=0, *args):
        return int(value.item() if isinstance(value, np.ndarray) else value, *args)


class _Int(metaclass=_Whole):
    """Triton 3.6's interpreter says int() to arrays of one element, which numpy 2.4 no longer does."""


interpreter.int = _Int  # type: ignore[attr-defined]


_convert = interpreter._convert_float  # type: ignore[attr-defined]


def _convert_rightly(values, from_type, to_type, rounding):
    """Its rounding to 8 bits loses the carry where a mantissa rounds up to the next power of two."""
    if str(to_type) == "fp8e4nv" and values.dtype == np.float32:
        eight = torch.from_numpy(np.ascontiguousarray(values)).to(torch.float8_e4m3fn)
        return eight.view(torch.uint8).numpy()
    return _convert(values, from_type, to_type, rounding)


interpreter._convert_float = _convert_rightly  # type: ignore[attr-defined]
