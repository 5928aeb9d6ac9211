"""Triton kernels of the update, for GPUs; nothing here is imported where there is none."""
