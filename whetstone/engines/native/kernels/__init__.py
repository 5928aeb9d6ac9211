"""Triton kernels of the native engine on a GPU: attention over pages, norms and gates, sampling.

Imported only where there is a GPU (or Triton's interpreter): Triton is no dependency on a CPU. `hopper` holds
faster CUDA C++ kernels; the engine works without that folder.
"""

try:
    import whetstone.engines.native.kernels.hopper as hopper
except ModuleNotFoundError as error:
    if error.name != "whetstone.engines.native.kernels.hopper":
        raise
    hopper = None

__all__ = ["hopper"]
