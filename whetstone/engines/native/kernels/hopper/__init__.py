"""CUDA C++ kernels for Hopper GPUs. Functions return None for other GPUs, dtypes and shapes."""

from whetstone.engines.native.kernels.hopper.attention import try_attention
from whetstone.engines.native.kernels.hopper.gated import try_gate_up
from whetstone.engines.native.kernels.hopper.linear import try_linear

__all__ = ["try_attention", "try_gate_up", "try_linear"]
