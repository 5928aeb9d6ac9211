"""Triton's interpreter, taught numpy's ways: imported by whatever runs kernels on the CPU."""

import numpy as np
from triton.runtime import interpreter


class _Whole(type):
    def __instancecheck__(cls, value):
        return isinstance(value, int)

    def __call__(cls, value=0, *args):
        return int(value.item() if isinstance(value, np.ndarray) else value, *args)


class _Int(metaclass=_Whole):
    """Triton 3.6's interpreter says int() to arrays of one element, which numpy 2.4 no longer does."""


interpreter.int = _Int  # type: ignore[attr-defined]
