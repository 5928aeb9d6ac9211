"""Triton kernels of the native engine on a GPU: attention over pages, norms and gates, the drawing of tokens.

Imported only where there is a GPU (or Triton's interpreter): Triton is no dependency on a CPU.
"""
