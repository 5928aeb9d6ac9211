"""CUDA C++ kernels for Hopper GPUs: the one entry point of this folder.

Each function returns None where its kernel does not apply: another GPU, data type or shape. The engine then
uses Triton and cuBLAS. It also runs without this folder.
"""

from whetstone.engines.native.kernels.hopper.attention import try_attention
from whetstone.engines.native.kernels.hopper.gated import try_gate_up
from whetstone.engines.native.kernels.hopper.linear import try_linear

__all__ = ["try_attention", "try_gate_up", "try_linear"]
